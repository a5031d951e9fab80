"""The command line: parse, call one function, print where the result is."""

import typer

app = typer.Typer(no_args_is_help=True)


def main() -> None:
    """Run the command line."""
    app()
