"""Run the command line with ``python -m dflash_tools`` (so that torchrun can start it)."""

from dflash_tools.cli import main

main()
