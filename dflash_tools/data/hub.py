"""Rows of a data set on the Hugging Face hub, streamed by the optional ``datasets`` library."""

from dflash_tools.data.columns import drop_nulls
from dflash_tools.data.manifest import HUB_PREFIX
from dflash_tools.data.raw import RawRow, RawRows
from dflash_tools.errors import DataError


def read_hub_rows(name: str) -> RawRows:
    """Stream the rows of ``hub:OWNER/NAME[:SPLIT]``; the split is ``train`` unless given.

    Raises:
        DataError: If the library is missing, or the data set cannot be read.
    """
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(f"{name}: hub data sets need one more library; run: pip install 'dflash-tools[hub]'") from None
    dataset, _, split = name.removeprefix(HUB_PREFIX).partition(":")
    try:
        stream = datasets.load_dataset(dataset, split=split or "train", streaming=True)
        for number, row in enumerate(stream, start=1):
            yield RawRow(number, drop_nulls(dict(row)))
    except (OSError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name}: cannot be read from the hub: {first_line}; download it and name its files") from None
