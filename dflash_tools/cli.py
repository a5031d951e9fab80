"""The command line: parse, call one function, print where the result is.

Heavy libraries load inside the commands, so that ``--help`` is instant.
"""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from dflash_tools import __version__
from dflash_tools.cli_options import (
    CheckpointOption,
    ConfigArgument,
    JsonOption,
    LayerIdsOption,
    SetOption,
    StoreOption,
    StoresOption,
)
from dflash_tools.cli_report import report_app
from dflash_tools.errors import ConfigError, Interrupted, UserError
from dflash_tools.printing import print_json, print_summary

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train DFlash drafters for speculative decoding from cached hidden states.",
)
app.add_typer(report_app, name="report")


@app.command()
def generate(
    config: ConfigArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSONL file of answers; extract takes it as it is.")],
    overrides: SetOption = None,
    json_output: JsonOption = False,
) -> None:
    """Have the target write the responses: token ids and loss mask exactly as generated."""
    from dflash_tools.config import GenerateConfig, load_config

    settings = load_config(config, GenerateConfig, overrides or ())  # before torch loads: a typo shows at once
    from dflash_tools.generate.run import run_generation

    print_summary(run_generation(settings, config.parent, out), json_output)


@app.command()
def extract(
    config: ConfigArgument,
    store: StoreOption,
    overrides: SetOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Keep only this many samples, an unbiased subset.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count and estimate; no model is loaded.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Print this many samples with their supervised tokens.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first row that would be dropped.")] = False,
    close: Annotated[bool, typer.Option("--close", help="Finish the store over the shards that are there.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Make damaged shards again.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove what is there first.")] = False,
    allow_versions: Annotated[
        bool, typer.Option("--allow-versions", help="Go on with a store begun under other library versions.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Run the target once and cache its hidden states in a store."""
    from dflash_tools.config import ExtractConfig, load_config

    settings = load_config(config, ExtractConfig, overrides or ())  # before torch loads: a typo shows at once
    from dflash_tools.extract.run import run_extraction

    summary = run_extraction(
        settings,
        config.parent,
        store,
        limit=limit,
        dry_run=dry_run,
        show=show,
        strict=strict,
        close=close,
        repair=repair,
        overwrite=overwrite,
        allow_versions=allow_versions,
    )
    if summary:  # under torchrun only the first process has one
        print_summary(summary, json_output)


@app.command()
def train(
    config: ConfigArgument,
    stores: StoresOption,
    run: Annotated[Path, typer.Option(metavar="RUN", help="Folder of the run.")],
    overrides: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print steps, memory and read rate; train nothing.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Train a drafter on one or more stores."""
    from dflash_tools.config import TrainConfig, load_config

    settings = load_config(config, TrainConfig, overrides or ())  # before torch loads: a typo shows at once
    from dflash_tools.train.run import run_training

    summary = run_training(settings, stores, run, resume=resume, dry_run=dry_run, config_dir=config.parent)
    if summary:  # under torchrun only the first process has one
        print_summary(summary, json_output)


@app.command()
def evaluate(
    path: Annotated[Path, typer.Argument(metavar="RUN_OR_EXPORT", help="A run folder or an exported drafter.")],
    checkpoint: CheckpointOption = "best",
    target: Annotated[str | None, typer.Option(help="The target; default the one the drafter was trained for.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="float32 (output must equal plain decoding) or bfloat16.")
    ] = "bfloat16",
    prompts: Annotated[str | None, typer.Option(help="A file of prompts, a data manifest, or builtin.")] = None,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="At most this many, spread over kinds.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 256,
    num_draft_tokens: Annotated[int | None, typer.Option(min=1, help="Drafted tokens per cycle.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    layer_ids_are: LayerIdsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Decode with drafter and target: true acceptance length and speed."""
    from dflash_tools.evaluate.run import run_evaluation

    result = run_evaluation(
        path,
        checkpoint=checkpoint,
        target=target,
        dtype=dtype,
        prompts=prompts,
        max_prompts=max_prompts,
        max_new_tokens=max_new_tokens,
        num_draft_tokens=num_draft_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
        layer_ids_are=layer_ids_are,
    )
    print_summary(result, json_output)
    if dtype == "float32" and temperature == 0.0 and not result["identical"]:
        raise typer.Exit(1)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    checkpoint: CheckpointOption = "best",
    layout: Annotated[Literal["zlab", "speculators"], typer.Option("--format", help="Checkpoint layout.")] = "zlab",
    push_to: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload the export to the Hugging Face hub.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write a drafter in the layout that serving engines load."""
    from dflash_tools.evaluate.export_run import export_run

    print_summary(export_run(run, out, checkpoint=checkpoint, layout=layout, push_to=push_to), json_output)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A DFlash checkpoint, ours or released.")],
    target: Annotated[str | None, typer.Option(help="Also check against this target.")] = None,
    layer_ids_are: LayerIdsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check a DFlash checkpoint against the rules that engines rely on."""
    from dflash_tools.evaluate.check_run import check_checkpoint

    findings = check_checkpoint(folder, target, layer_ids_are)
    faults = [finding for finding in findings if not finding.ok]
    if json_output:
        print_json({"ok": not faults, "findings": findings})
    else:
        for finding in findings:
            typer.echo(str(finding))
        typer.echo(f"{len(findings)} rules checked, {len(faults)} faults")
    if faults:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Folder of the cache.")],
    layout: Annotated[
        Literal["speculators", "specforge", "modelopt"], typer.Option("--from", help="The tool that wrote it.")
    ],
    store: StoreOption,
    target: Annotated[str, typer.Option(help="The cached target: folder, hub id, or package:NAME.")],
    target_layer_ids: Annotated[str, typer.Option(metavar="IDS", help="Cached layers in their order, e.g. 1,9,17.")],
    layer_ids_are: LayerIdsOption = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the target.")] = None,
    gguf_file: Annotated[str | None, typer.Option(help="GGUF file of the target.")] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="The target ran in it.")
    ] = "bfloat16",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the target.")] = False,
    keep_last_hidden_state: Annotated[
        bool, typer.Option("--keep-last-hidden-state", help="Keep it, for distillation.")
    ] = False,
    last_hidden_state_is: Annotated[
        Literal["pre_norm", "post_norm"] | None, typer.Option(help="Before or after the final norm; default by tool.")
    ] = None,
    masks: Annotated[Path | None, typer.Option(help="Dataset folder with loss_mask, for speculators.")] = None,
    loss_on: Annotated[
        Literal["all"] | None, typer.Option(help="Supervise all tokens of files without a mask.")
    ] = None,
    hidden_states_dtype: Annotated[Literal["bfloat16", "fp8"], typer.Option(help="As in extract.toml.")] = "bfloat16",
    codec: Annotated[Literal["none", "lossless"], typer.Option(help="As in extract.toml.")] = "none",
    buckets: Annotated[int, typer.Option(min=1, help="Number of length buckets.")] = 6,
    validation_fraction: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share held out.")] = 0.02,
    json_output: JsonOption = False,
) -> None:
    """Turn the per-sample cache of another tool into a store."""
    from dflash_tools.convert.run import run_conversion

    summary = run_conversion(
        source,
        layout,
        store,
        target=target,
        target_layer_ids=_read_ids(target_layer_ids),
        layer_ids_are=layer_ids_are,
        revision=revision,
        gguf_file=gguf_file,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        keep_last_hidden_state=keep_last_hidden_state,
        last_hidden_state_is=last_hidden_state_is,
        masks=masks,
        loss_on=loss_on,
        hidden_states_dtype=hidden_states_dtype,
        codec=codec,
        buckets=buckets,
        validation_fraction=validation_fraction,
    )
    print_summary(summary, json_output)


@app.command()
def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the store.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read and check every byte.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Check that a store is complete and undamaged."""
    from dflash_tools.store.verify import verify_store

    damage = verify_store(store, deep=deep)
    if json_output:
        print_json({"ok": not damage, "damage": damage})
    else:
        for item in damage:
            typer.echo(str(item))
        typer.echo(f"{store}: {len(damage)} damaged places" if damage else f"{store}: ok")
    if damage:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for store, run, report and export.")] = Path(
        "demo-out"
    ),
    json_output: JsonOption = False,
) -> None:
    """Run the whole chain on a small real model and real text."""
    from dflash_tools.demo import run_demo

    print_summary(run_demo(out), json_output)


def _read_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--target-layer-ids {text}: expected layers separated by commas, e.g. 1,9,17") from None


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train DFlash drafters for speculative decoding from cached hidden states."""


def main() -> None:
    """Run the command line; user errors end with one message and exit code 2."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        app()
    except UserError as error:
        typer.echo(f"dflash-tools: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # a path that is no folder, may not be written, or lies on a full disk
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"dflash-tools: {where}{error.strerror or error}; correct the path, or make room there", err=True)
        sys.exit(2)
    except Interrupted as interruption:
        typer.echo(f"dflash-tools: {interruption}; run the same command again to go on", err=True)
        sys.exit(128 + interruption.signum)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise Interrupted(signum)
