"""What a run did, as tables and charts."""

import polars as pl

from dflash_tools.report import composition
from dflash_tools.report.document import Chart, Section, Table, keep
from dflash_tools.report.run_frames import RunFrames

MAX_POINTS = 1500


def curve_section(frames: RunFrames) -> Section:
    """Loss, acceptance, accuracy, grad norm and learning rate over steps."""
    steps = frames.steps
    thinned, remark = composition.thin(
        steps.select(
            "step", "loss", "adjusted_loss", "acceptance_length", "grad_norm", "learning_rate", "tokens_per_second"
        )
        .cast(pl.Float64)
        .with_columns(pl.all().fill_nan(None))
    )
    curves = thinned.select("step", pl.col("loss").alias("as logged"), pl.col("adjusted_loss").alias("bucket-adjusted"))
    return Section(
        title="Curves",
        text=(
            "Batches of other lengths draw a sawtooth even when the weights are fine. The bucket-adjusted loss "
            "moves every "
            "bucket to the common level: what remains in it is about the weights."
        ),
        parts=keep(
            Chart(
                name="loss",
                title="Loss over steps",
                description=f"Logged and bucket-adjusted loss.{remark}",
                kind="line",
                frame=_long(curves, "curve", "loss"),
                x="step",
                y="loss",
                color="curve",
            ),
            Chart(
                name="loss_by_bucket",
                title="Loss of batches, coloured by bucket",
                description=_sampled_remark(frames.batches),
                kind="points",
                frame=_sampled(frames.batches.filter(pl.col("label_weight") > 0)).select("step", "loss", "bucket"),
                x="step",
                y="loss",
                color="bucket",
            ),
            _line(
                thinned,
                "grad_norm",
                "Grad norm over steps",
                f"Before clipping; vertical axis in logarithms.{remark}",
                log_y=True,
            ),
            _norm_points(frames),
            _line(
                thinned,
                "acceptance_length",
                "Estimated acceptance length over steps",
                f"Bonus token counted; 1 = no drafted token accepted.{remark}",
            ),
            accuracy_chart(frames),
            _line(thinned, "learning_rate", "Learning rate over steps", f"As used by the update.{remark}"),
            _line(thinned, "tokens_per_second", "Real tokens per second", f"Padding not counted.{remark}"),
            Table(name="steps", title="Steps", frame=steps.drop("accuracy_by_slot", "count_by_slot"), shown=False),
            Table(name="trained_batches", title="Batches as trained", frame=frames.batches, shown=False),
        ),
    )


def accuracy_chart(frames: RunFrames) -> Chart:
    """Accuracy of every block slot over the last tenth of the run."""
    recent = frames.steps.tail(max(1, len(frames.steps) // 10))
    pairs = (
        recent.select("accuracy_by_slot", "count_by_slot")
        .with_columns(pl.int_ranges(1, pl.col("accuracy_by_slot").list.len() + 1).alias("slot"))
        .explode("slot", "accuracy_by_slot", "count_by_slot")
        .drop_nulls()
        .filter(pl.col("count_by_slot") > 0)
    )
    frame = (
        pairs.group_by("slot")
        .agg(
            ((pl.col("accuracy_by_slot") * pl.col("count_by_slot")).sum() / pl.col("count_by_slot").sum()).alias(
                "accuracy"
            )
        )
        .sort("slot")
    )
    return Chart(
        name="accuracy_by_slot",
        title="Accuracy by position in the block",
        description="Supervised slots of the last tenth of the run; slot 1 is the first drafted token.",
        kind="bars",
        frame=frame,
        x="slot",
        y="accuracy",
    )


def held_out_section(evaluations: pl.DataFrame) -> Section:
    """Held-out loss and acceptance length."""
    columns = ["step", "loss", "acceptance_length", "num_samples", "num_blocks", "num_truncated_blocks", "seconds"]
    by_bucket = (
        evaluations.select("step", pl.col("by_bucket"))
        .explode("by_bucket")
        .unnest("by_bucket")
        .drop_nulls("bucket_id")
        .with_columns(pl.col("bucket_id").cast(pl.Int32))
    )
    return Section(
        title="Held-out samples",
        text=(
            "The same blocks every time, so this curve has no sawtooth: it says whether a rise of the training loss "
            "was harm."
        ),
        parts=keep(
            Chart(
                name="held_out_loss",
                title="Held-out loss",
                description="Over updates done.",
                kind="line",
                frame=evaluations.select("step", "loss"),
                x="step",
                y="loss",
            ),
            Chart(
                name="held_out_acceptance",
                title="Held-out acceptance length",
                description="Estimated on whole blocks, bonus token counted.",
                kind="line",
                frame=evaluations.select("step", "acceptance_length"),
                x="step",
                y="acceptance_length",
            ),
            Chart(
                name="held_out_by_bucket",
                title="Held-out loss by bucket",
                description="One line a bucket.",
                kind="line",
                frame=composition.with_labels(by_bucket).select("step", "loss", "bucket")
                if len(by_bucket)
                else by_bucket,
                x="step",
                y="loss",
                color="bucket",
            ),
            Table(name="evaluations", title="Evaluations", frame=evaluations.select(columns)),
        ),
    )


def reset_section(frames: RunFrames) -> Section:
    """Loss jumps that the buckets do not explain, with what surrounds them."""
    number = len(frames.resets)
    return Section(
        title="Resets",
        text=(
            f"{number} jumps of the loss above the level of its buckets."
            + (
                " Near: what happened up to two steps before, so that data, checkpoints and order can be told apart."
                if number
                else ""
            )
        ),
        parts=keep(
            Table(name="resets", title="Resets", frame=frames.resets),
            Table(
                name="causes",
                title="What is near resets",
                frame=frames.causes,
                note=(
                    "Share of steps: how often it is near any step. Chance: of so many resets near it if they fell "
                    "blindly."
                ),
            ),
            Table(name="resets_around", title="Batches around each reset", frame=frames.around),
        ),
    )


def effect_section(frames: RunFrames) -> Section:
    """What the bucket of a batch explains."""
    explained = pl.DataFrame(
        [
            {"curve": name, "eta_squared": value.eta_squared, "eta_squared_by_chance": value.eta_squared_by_chance}
            for name, value in frames.explained.items()
        ]
    )
    norms = frames.levels.select("bucket_id", "median_grad_norm").drop_nulls()
    return Section(
        title="What the bucket explains",
        text=(
            "Eta squared: share of the variance around the running mean that the bucket (for steps: the mix of "
            "buckets) explains."
        ),
        parts=keep(
            Table(
                name="explained",
                title="Explained variance",
                frame=explained,
                note="By chance: what buckets that do not matter would explain.",
            ),
            Table(
                name="levels",
                title="Levels by bucket",
                frame=frames.levels,
                note=(
                    "Recent: last 200 batches. Residual: loss above the level of the bucket, right after a change "
                    "of bucket and inside a run. "
                    "Grad norm: of steps whose most frequent bucket it is."
                ),
            ),
            Chart(
                name="residuals",
                title="Loss above the level of its bucket",
                description="A bar from the 10th to the 90th percentile over batches, with a mark at the median.",
                kind="ranges",
                frame=_residual_ranges(frames.batches),
                x="bucket",
                y="residual",
            ),
            Chart(
                name="grad_norm_by_bucket",
                title="Median grad norm of steps by their most frequent bucket",
                description="Before clipping.",
                kind="bars",
                frame=composition.with_labels(norms).select("bucket", "median_grad_norm") if len(norms) else norms,
                x="bucket",
                y="median_grad_norm",
                titles={"median_grad_norm": "median grad norm"},
            ),
        ),
    )


def time_section(frames: RunFrames, against_plan: pl.DataFrame) -> Section:
    """Where the time went, and planned against trained."""
    thinned, remark = composition.thin(
        frames.steps.select("step", "data_wait_seconds", "compute_seconds", "checkpoint_seconds").cast(pl.Float64), 300
    )
    names = {"data_wait_seconds": "data wait", "compute_seconds": "compute", "checkpoint_seconds": "checkpoint"}
    return Section(
        title="Time, and planned against trained",
        parts=keep(
            Table(name="timing", title="Seconds by kind of work", frame=frames.timing),
            Chart(
                name="time_split",
                title="Seconds of a step",
                description=f"Data wait, compute and checkpoint.{remark}",
                kind="line",
                frame=_long(thinned.rename(names), "work", "seconds"),
                x="step",
                y="seconds",
                color="work",
            ),
            Table(name="planned", title="Planned and trained", frame=against_plan),
        ),
    )


def _line(frame: pl.DataFrame, column: str, title: str, description: str, *, log_y: bool = False) -> Chart:
    drawn = frame.select("step", column).drop_nulls()
    if log_y:
        drawn = drawn.filter(pl.col(column) > 0)
    return Chart(
        name=column, title=title, description=description, kind="line", frame=drawn, x="step", y=column, log_y=log_y
    )


def _norm_points(frames: RunFrames) -> Chart:
    main = frames.batches.group_by("step").agg(pl.col("bucket_id").mode().min())
    steps = frames.steps.select("step", "grad_norm").filter(pl.col("grad_norm").is_finite() & (pl.col("grad_norm") > 0))
    frame = _sampled(steps.join(main, on="step", maintain_order="left"))
    return Chart(
        name="grad_norm_points",
        title="Grad norm of steps, coloured by their most frequent bucket",
        description=f"Vertical axis in logarithms. {_sampled_remark(steps)}",
        kind="points",
        frame=frame.select("step", "grad_norm", "bucket"),
        x="step",
        y="grad_norm",
        color="bucket",
        log_y=True,
    )


def _sampled(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows for a cloud of points, drawn once and for all from all of them, sorted so that the legend is in order."""
    some = rows.sample(MAX_POINTS, seed=0) if len(rows) > MAX_POINTS else rows
    return (
        composition.with_labels(some.sort("bucket_id", "step")) if len(some) else some.with_columns(bucket=pl.lit(""))
    )


def _sampled_remark(rows: pl.DataFrame) -> str:
    if len(rows) <= MAX_POINTS:
        return f"All {len(rows):,} points."
    return f"{MAX_POINTS:,} of {len(rows):,} points, drawn at random."


def _long(wide: pl.DataFrame, name: str, value: str) -> pl.DataFrame:
    return wide.unpivot(index="step", variable_name=name, value_name=value).drop_nulls().select("step", value, name)


def _residual_ranges(batches: pl.DataFrame) -> pl.DataFrame:
    known = batches.drop_nulls("residual")
    if known.is_empty():
        return pl.DataFrame()
    ranges = known.group_by("bucket_id").agg(
        pl.col("residual").quantile(0.1).alias("low"),
        pl.col("residual").median(),
        pl.col("residual").quantile(0.9).alias("high"),
    )
    return composition.with_labels(ranges.sort("bucket_id")).select("bucket", "low", "residual", "high")
