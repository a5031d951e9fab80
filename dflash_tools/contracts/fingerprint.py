"""Identity of content: SHA-256 over canonical JSON, arrays and files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def fingerprint_of_json(value: Any) -> str:
    """Hash a JSON-able value; key order does not matter. Returns 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint_of_arrays(*arrays: NDArray[Any]) -> str:
    """Hash arrays by dtype, shape and bytes, in order. Returns 64 hex digits."""
    digest = hashlib.sha256()
    for array in arrays:
        # Little-endian bytes, so that the identity does not depend on the machine.
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{little.dtype.str}{little.shape}".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()


def checksum_of_file(path: Path) -> str:
    """Hash the bytes of a file. Returns 64 hex digits of SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
