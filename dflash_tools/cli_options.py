"""Arguments and options that several commands share, so that one thing has one name everywhere."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, e.g. pipelines/demo/train.toml.")]
StoreOption = Annotated[Path, typer.Option("--store", metavar="STORE", help="Folder of the store.")]
StoresOption = Annotated[
    list[Path], typer.Option("--store", metavar="STORE", help="Folder of a store; repeat it to use several.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key of the config, e.g. plan.seed=1."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Also write report.html, report.md and the tables.")
]
LayerIdsOption = Annotated[
    Literal["zlab", "vllm"] | None,
    typer.Option(help="Convention of the layer ids where the file cannot tell: zlab or vllm."),
]
CheckpointOption = Annotated[str, typer.Option("--checkpoint", help="best, latest, or a number of steps.")]
