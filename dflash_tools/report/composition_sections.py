"""The part that plans and runs share: what batches hold and how they follow each other, as tables and charts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from dflash_tools.plan import statistics
from dflash_tools.report import composition
from dflash_tools.report.columns import largest_of, mean_of, numbers, total_of
from dflash_tools.report.document import Chart, Section, Table, keep
from dflash_tools.report.format import format_value


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Frames over the batches of a plan or a run, computed once and read by tables, charts and diagnosis."""

    batches: pl.DataFrame
    buckets: pl.DataFrame
    runs: pl.DataFrame
    transitions: pl.DataFrame
    lags: pl.DataFrame
    tenths: pl.DataFrame
    steps: pl.DataFrame
    padding_efficiency: float
    equal_neighbours: int
    equal_neighbours_minimum: int
    entropy_bits: float  # of the buckets of all batches

    @property
    def mean_step_entropy_bits(self) -> float:
        """Mean entropy of the buckets of a step."""
        return mean_of(self.steps, "entropy_bits")

    @property
    def lag_1_correlation(self) -> float:
        """Correlation of the mean length of neighbouring batches; NaN if undefined."""
        values = self.lags.filter(pl.col("lag") == 1).get_column("correlation")
        return float(values[0]) if len(values) else float("nan")

    def figures(self) -> dict[str, Any]:
        """Figures for the head of a report and its JSON."""
        batches = self.batches
        return {
            "num_epochs": batches.get_column("epoch").n_unique(),
            "num_steps": len(self.steps),
            "num_batches": len(batches),
            "num_tokens": total_of(batches, "num_tokens"),
            "num_padded_tokens": total_of(batches, "num_padded_tokens"),
            "num_supervised_tokens": total_of(batches, "num_supervised_tokens"),
            "num_anchors": total_of(batches, "num_anchors"),
            "padding_efficiency": self.padding_efficiency,
            "equal_neighbours": self.equal_neighbours,
            "equal_neighbours_minimum": self.equal_neighbours_minimum,
            "lag_1_correlation": self.lag_1_correlation,
            "mean_step_entropy_bits": self.mean_step_entropy_bits,
            "entropy_bits": self.entropy_bits,
            "buckets": self.buckets.to_dicts(),
        }


def compose(batches: pl.DataFrame) -> Composition:
    """Compute every frame from a frame of batches."""
    bucket_ids, epochs = composition.order_columns(batches)
    return Composition(
        batches=batches,
        buckets=composition.bucket_frame(batches),
        runs=composition.run_frame(batches),
        transitions=composition.transition_frame(batches),
        lags=composition.lag_frame(batches),
        tenths=composition.tenth_frame(batches),
        steps=composition.step_frame(batches),
        padding_efficiency=composition.padding_efficiency(batches),
        equal_neighbours=statistics.count_equal_neighbours(bucket_ids, epochs),
        equal_neighbours_minimum=statistics.fewest_equal_neighbours(bucket_ids, epochs),
        entropy_bits=composition.whole_entropy(batches),
    )


def bucket_section(whole: Composition, extra: tuple[Table | Chart | None, ...] = ()) -> Section:
    """What each bucket holds."""
    names = {
        "share_of_samples": "samples",
        "share_of_tokens": "tokens",
        "share_of_supervised_tokens": "supervised tokens",
        "share_of_anchors": "anchors",
        "share_of_batches": "batches",
    }
    shares = (
        composition.with_labels(whole.buckets)
        .unpivot(list(names), index="bucket", variable_name="of", value_name="share")
        .with_columns(pl.col("of").replace_strict(names, return_dtype=pl.String))
    )
    return Section(
        title="Buckets",
        text=(
            "Samples of one length range; a batch holds samples of one bucket. Efficiency = real tokens / padded "
            "tokens."
        ),
        parts=keep(
            Table(name="buckets", title="Buckets", frame=whole.buckets),
            Chart(
                name="bucket_shares",
                title="Share of each bucket",
                description=_largest_share(whole.buckets),
                kind="bars",
                frame=shares,
                x="bucket",
                y="share",
                color="of",
            ),
            Chart(
                name="batch_sizes",
                title="Samples in a batch",
                description="A bar from the 10th to the 90th percentile of batch size, with a mark at the median.",
                kind="ranges",
                frame=_ranges(whole.batches, "batch_size"),
                x="bucket",
                y="batch_size",
            ),
            Chart(
                name="batch_efficiency",
                title="Padding efficiency of a batch",
                description=(
                    "A bar from the 10th to the 90th percentile of real / padded tokens, with a mark at the median."
                ),
                kind="ranges",
                frame=_ranges(
                    whole.batches.with_columns(padding_efficiency=pl.col("num_tokens") / pl.col("num_padded_tokens")),
                    "padding_efficiency",
                ),
                x="bucket",
                y="padding_efficiency",
            ),
            *extra,
        ),
    )


def order_section(whole: Composition) -> Section:
    """How buckets follow each other."""
    return Section(
        title="Order",
        text=(
            f"{whole.equal_neighbours:,} of {max(len(whole.batches) - 1, 0):,} neighbouring pairs of batches share a "
            "bucket; "
            f"no order has fewer than {whole.equal_neighbours_minimum:,}."
        ),
        parts=keep(
            Table(
                name="run_lengths",
                title="Runs of equal buckets",
                frame=whole.runs,
                note="Unavoidable: the runs of an order with the fewest neighbouring repeats.",
            ),
            _run_chart(whole.runs),
            Chart(
                name="transitions",
                title="What follows a bucket",
                description=(
                    "Rows: a batch's bucket; columns: the bucket of the next batch; cells: share of what follows."
                ),
                kind="heatmap",
                frame=whole.transitions,
                x="to_bucket",
                y="from_bucket",
                color="share",
            ),
            _lag_chart(whole),
        ),
    )


def mixing_section(whole: Composition, extra: tuple[Table | Chart | None, ...] = ()) -> Section:
    """How evenly buckets are spread over an epoch and inside a step."""
    tenths = composition.with_labels(whole.tenths)
    entropy, remark = composition.thin(whole.steps.select("step", "entropy_bits", "padding_efficiency", "mean_tokens"))
    return Section(
        title="Mixing",
        text=(
            f"A step mixes {mean_of(whole.steps, 'num_buckets'):.2f} buckets on average, "
            f"{whole.mean_step_entropy_bits:.2f} bits of entropy; all batches together have {whole.entropy_bits:.2f} "
            "bits."
        ),
        parts=keep(
            Chart(
                name="tenths",
                title="Buckets in each tenth of an epoch",
                description=f"Stacked shares of batches, all epochs together. {_drift(whole.tenths)}",
                kind="stack",
                frame=tenths.select("tenth", "bucket", "share_of_batches"),
                x="tenth",
                y="share_of_batches",
                color="bucket",
                titles={"share_of_batches": "share of batches", "tenth": "tenth of the epoch"},
            ),
            _entropy_chart(whole, entropy, remark),
            Chart(
                name="step_mean_tokens",
                title="Mean length of the samples of a step",
                description=f"Unit: tokens.{remark}",
                kind="line",
                frame=entropy.select("step", "mean_tokens"),
                x="step",
                y="mean_tokens",
                titles={"mean_tokens": "mean length (tokens)"},
            ),
            Chart(
                name="step_efficiency",
                title="Padding efficiency of a step",
                description=f"Real / padded tokens.{remark}",
                kind="line",
                frame=entropy.select("step", "padding_efficiency"),
                x="step",
                y="padding_efficiency",
                titles={"padding_efficiency": "padding efficiency"},
            ),
            *extra,
            Table(name="tenths_table", title="Buckets by tenth of an epoch", frame=_wide(tenths), shown=False),
            Table(name="batches", title="Batches", frame=whole.batches, shown=False),
            Table(name="step_composition", title="Steps", frame=whole.steps, shown=False),
        ),
    )


def _entropy_chart(whole: Composition, thinned: pl.DataFrame, remark: str) -> Chart | None:
    if largest_of(whole.steps, "num_batches") < 2:
        return None
    return Chart(
        name="step_entropy",
        title="Entropy of the buckets of a step",
        description=f"Unit: bits; {whole.entropy_bits:.2f} would be as mixed as all batches together.{remark}",
        kind="line",
        frame=thinned.select("step", "entropy_bits"),
        x="step",
        y="entropy_bits",
        titles={"entropy_bits": "entropy (bits)"},
    )


def _run_chart(runs: pl.DataFrame) -> Chart:
    names: Mapping[str, str] = {"num_runs": "here", "num_runs_unavoidable": "unavoidable"}
    frame = runs.unpivot(list(names), index="run_length", variable_name="order", value_name="number").with_columns(
        pl.col("order").replace_strict(names, return_dtype=pl.String)
    )
    longest = largest_of(runs.filter(pl.col("num_runs") > 0), "run_length")
    return Chart(
        name="run_length_chart",
        title="Runs of equal buckets by length",
        description=f"The longest run here has {longest} batches. Vertical axis: number of runs, compressed.",
        kind="bars",
        frame=frame,
        x="run_length",
        y="number",
        color="order",
        titles={"run_length": "batches in a row", "number": "runs"},
        log_y=True,
    )


def _lag_chart(whole: Composition) -> Chart:
    names = {"correlation": "here", "correlation_of_the_rule_alone": "never repeating a bucket alone"}
    frame = whole.lags.rename(names).unpivot(
        list(names.values()), index="lag", variable_name="order", value_name="correlation"
    )
    return Chart(
        name="lags",
        title="Correlation of mean length with the batch k places later",
        description=(
            f"At lag 1 it is {format_value('', whole.lag_1_correlation)}. An order that never repeats a bucket makes "
            "it negative; drifting lengths make it positive."
        ),
        kind="bars",
        frame=frame,
        x="lag",
        y="correlation",
        color="order",
        titles={"lag": "places apart"},
    )


def _ranges(batches: pl.DataFrame, column: str) -> pl.DataFrame:
    return composition.with_labels(
        batches.group_by("bucket_id")
        .agg(
            pl.col(column).quantile(0.1).alias("low"),
            pl.col(column).median(),
            pl.col(column).quantile(0.9).alias("high"),
        )
        .sort("bucket_id")
    ).select("bucket", "low", column, "high")


def _wide(tenths: pl.DataFrame) -> pl.DataFrame:
    return tenths.pivot("bucket", index="tenth", values="share_of_batches")


def _largest_share(buckets: pl.DataFrame) -> str:
    top = buckets.sort("share_of_batches").row(-1, named=True)
    return (
        f"Bars per bucket. The largest, {composition.label_of(top['bucket_id'])} ({top['min_tokens']:,} to "
        f"{top['max_tokens']:,} tokens), "
        f"makes {top['share_of_batches']:.0%} of batches and {top['share_of_tokens']:.0%} of tokens."
    )


def _drift(tenths: pl.DataFrame) -> str:
    spread = tenths.group_by("bucket_id").agg(
        (pl.col("share_of_batches").max() - pl.col("share_of_batches").min()).alias("span")
    )
    return f"No bucket's share moves by more than {numbers(spread, 'span').max():.1%}." if len(spread) else ""
