"""The pages hold what they promise: links lead somewhere, commands and options exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from dflash_tools.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("pipelines/**/*.md")])


def page_id(path):
    return str(path.relative_to(ROOT))


def shell_lines(text):
    for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, flags=re.DOTALL):
        joined = re.sub(r"\\\n\s*", " ", block)
        yield from (line.strip() for line in joined.splitlines() if line.strip().startswith("dflash-tools "))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_leads_to_a_file(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_on_a_page_exists_with_its_options(page):
    for line in shell_lines(page.read_text()):
        words = shlex.split(line, comments=True)[1:]
        command = get_command(app)
        while words and hasattr(command, "commands") and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert not hasattr(command, "commands") or words == ["--help"], f"{page.name}: {line}"
        known = {option for parameter in command.params for option in parameter.opts}
        used = {word for word in words if word.startswith("--")}
        assert used <= known | {"--help"}, f"{page.name}: {line}: {used - known}"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def test_decisions_are_numbered_without_gaps():
    numbers = sorted(int(path.name[:4]) for path in (ROOT / "docs" / "decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))
