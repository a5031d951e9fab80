"""The page opens from disk, offline, and reads without seeing its pictures."""

import json
import re
from html.parser import HTMLParser

import polars as pl
import pytest

from dflash_tools.report import report_run
from dflash_tools.report.document import Chart, Report, Section, Table
from dflash_tools.report.html import to_html


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def report_of(part) -> Report:
    return Report(kind="run", title="t", subject="s", figures={}, sections=(Section(title="x", parts=(part,)),))


@pytest.fixture(scope="module")
def report(run):
    return report_run(run)


@pytest.fixture(scope="module")
def text(report):
    return to_html(report)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_nothing_is_fetched(page, text):
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (name, value)
    styles = "".join(page.texts["style"])
    assert "url(" not in styles
    assert "@import" not in styles
    assert "http" not in "".join(page.texts.get("script", [])[-1:])
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    assert "unsafe-eval" not in policy


def test_every_chart_has_a_title_a_description_and_its_table(page, report, text):
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', text, re.DOTALL)[1])
    drawn = [attributes["id"] for _, attributes in page.elements if attributes.get("class") == "chart"]
    assert drawn == [f"chart-{chart.name}" for chart in report.charts]
    assert list(specs) == [chart.name for chart in report.charts]
    for chart in report.charts:
        assert specs[chart.name]["description"].startswith(chart.title)
        assert len(chart.description) > 5
    assert len(page.all("figure")) == len(page.all("details")) == len(report.charts)


def test_everything_can_be_reached_by_keyboard_and_read_aloud(page, report):
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(attributes.get(name, "").split()) <= ids
        if attributes.get("href", "").startswith("#"):
            assert attributes["href"][1:] in ids
        if attributes.get("class") in ("chart", "scroll"):
            assert attributes["tabindex"] == "0"
            assert attributes["role"]
    assert page.all("html")[0]["lang"] == "en"
    assert all(cell.get("scope") == "col" for cell in page.all("th"))
    assert len(page.all("h1")) == 1
    assert len(page.all("table")) == len(page.all("caption"))


def test_the_page_has_a_dark_and_a_printed_form(page):
    (styles,) = page.texts["style"]
    assert "prefers-color-scheme: dark" in styles
    assert "@media print" in styles


def test_the_diagnosis_comes_before_everything_else(page, text):
    assert text.index('id="diagnosis"') < text.index('class="figures"') < text.index('id="section-1"')


def test_names_of_users_cannot_become_markup():
    evil = "</script><img src=http://example.com/x onerror=alert(1)>"
    frame = pl.DataFrame({"name": [evil], "value": [1.0]})
    chart = Chart(name="c", title=evil, description=evil, kind="bars", frame=frame, x="name", y="value")
    table = Table(name="t", title=evil, frame=frame)
    page = Page(
        to_html(
            Report(
                kind="plan",
                title=evil,
                subject=evil,
                figures={"name": evil},
                diagnosis=(evil,),
                sections=(Section(title=evil, parts=(chart, table)),),
            )
        )
    )
    assert page.all("img") == []


def test_a_chart_of_numbers_that_are_none_still_is_json():
    frame = pl.DataFrame({"step": [0.0, 1.0], "loss": [float("nan"), 2.0]})
    chart = Chart(name="c", title="t", description="d", kind="line", frame=frame, x="step", y="loss")
    text = to_html(report_of(chart))
    specs = json.loads(re.search(r'id="specs">(.*?)</script>', text, re.DOTALL)[1])
    assert specs["c"]["data"]["values"] == [{"step": 0.0, "loss": None}, {"step": 1.0, "loss": 2.0}]


def test_a_long_table_says_where_the_rest_is():
    table = Table(name="long", title="t", frame=pl.DataFrame({"n": range(600)}))
    text = to_html(report_of(table))
    assert "First 500 of 600 rows; all are in tables/long.parquet." in text
