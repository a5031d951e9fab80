"""JSON bytes -> values; what the text of a row may not hold is replaced and counted, or refused."""

import json
import re
from typing import Any

from pydantic_core import from_json

from dflash_tools.data.raw import RawRow
from dflash_tools.data.sample import RowError

# Columnar files hold values that JSON has no word for, such as dates.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_row(row: RawRow, notes: set[str]) -> Any:
    """Parse a raw row.

    Args:
        row: Bytes, or what a columnar reader built.
        notes: Takes ``lone surrogates replaced``.

    Raises:
        RowError: If the row is damaged, no UTF-8, or no JSON.
    """
    if row.damage:
        raise RowError("damaged_file", f"{row.damage}; the file's rows from here on are lost")
    if not isinstance(row.content, bytes):
        return row.content
    try:
        return from_json(row.content)
    except ValueError:
        pass
    # The strict parser refuses lone surrogates and deep nesting; the standard one says what is wrong.
    try:
        value = json.loads(row.content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"byte {error.start + 1} of the row is no UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RowError("invalid_json", str(error)) from None
    if _LONE_SURROGATE.search(to_json(value)):
        notes.add("lone surrogates replaced")
        value = _replace_surrogates(value)
    return value


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    return value
