"""The report commands: what a store, a plan, a run, or several of them hold."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_tools.cli_options import ConfigArgument, JsonOption, OutOption, SetOption, StoresOption
from dflash_tools.printing import print_json

if TYPE_CHECKING:
    from dflash_tools.report import Report

report_app = typer.Typer(no_args_is_help=True, help="Analyse batch composition: a store, a plan, a run, or several.")


@report_app.command("store")
def report_store_command(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the store.")],
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show what is cached: buckets, lengths, bytes, supervised tokens, dropped rows."""
    from dflash_tools.report import report_store

    _show_report(report_store(store), out, json_output)


@report_app.command("plan")
def report_plan_command(
    config: ConfigArgument,
    stores: StoresOption,
    overrides: SetOption = None,
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show what a run would do, from the index alone."""
    from dflash_tools.config import TrainConfig, load_config
    from dflash_tools.report import report_plan

    _show_report(report_plan(load_config(config, TrainConfig, overrides or ()), stores), out, json_output)


@report_app.command("run")
def report_run_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, also while it trains.")],
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show what a run did: the plan joined with the log."""
    from dflash_tools.report import report_run

    _show_report(report_run(run), out, json_output)


@report_app.command("compare")
def report_compare_command(
    paths: Annotated[list[Path], typer.Argument(metavar="A B [C]...", help="Run folders or plan files.")],
    out: OutOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show runs or plans side by side."""
    from dflash_tools.report import report_compare

    _show_report(report_compare(paths), out, json_output)


def _show_report(report: "Report", out: Path | None, as_json: bool) -> None:
    from dflash_tools.report import print_report, write_report

    if out is not None:
        write_report(report, out)
    if as_json:
        print_json(report.to_dict())
    else:
        print_report(report)
        if out is not None:
            typer.echo(f"written: {out / 'report.html'}, {out / 'report.md'} and tables as Parquet")
