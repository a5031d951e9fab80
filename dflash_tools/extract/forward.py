"""Forward batches of the target: padded, captured, halved when memory runs out, brought to the host.

Shapes: B samples, T tokens, K captured layers, H hidden size.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_tools.errors import StoreError
from dflash_tools.store.files import write_file
from dflash_tools.target.capture import capture_states
from dflash_tools.target.load import Target

MEMORY_NAME = "memory.json"


@dataclass(frozen=True, eq=False)
class HostStates:
    """bfloat16 states of one batch on their way to, or in, host memory."""

    states_BTKH: Tensor
    lengths: tuple[int, ...]
    copied: Any = None  # CUDA event; None on CPU

    def samples(self) -> list[NDArray[np.uint16]]:
        """bfloat16 bits of each sample, once they have arrived. Shape of each: (num_tokens, K, H)."""
        if self.copied is not None:
            self.copied.synchronize()
        bits_BTKH = self.states_BTKH.view(torch.uint16).numpy()
        return [bits_BTKH[row, :length] for row, length in enumerate(self.lengths)]


@dataclass(eq=False)
class Forward:
    """Runs batches and remembers how many padded tokens fit.

    Attributes:
        target: A loaded target.
        layer_ids: Captured layers.
        last: Also capture the last layer's output.
        safe_tokens: Padded tokens of a batch that fit after memory ran out once; None = it never did.
    """

    target: Target
    layer_ids: tuple[int, ...]
    last: bool = False
    safe_tokens: int | None = None
    _stream: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.target.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.target.device)  # type: ignore[no-untyped-call]

    def run(self, input_ids: Sequence[NDArray[np.int32]], names: Sequence[str]) -> tuple[list[HostStates], bool]:
        """Run one forward batch.

        Args:
            input_ids: One array per sample. Shape of each: (num_tokens,).
            names: How each sample is called in an error.

        Returns:
            States in the order of the samples, and whether the batch had to be cut.

        Raises:
            StoreError: If even one sample does not fit; it is named.
        """
        pieces = self._cut(list(range(len(input_ids))), input_ids)
        done: list[HostStates] = []
        while pieces:
            rows = pieces.pop(0)
            states = self._try(rows, input_ids)
            if states is not None:
                done.append(states)
                continue
            if len(rows) == 1:
                raise StoreError(
                    f"{names[rows[0]]}: {len(input_ids[rows[0]])} tokens do not fit into the memory of "
                    f"{self.target.device}, even alone. Lower data.max_tokens, or give the target more memory "
                    "(target.device_map, target.dtype)"
                )
            half = (len(rows) + 1) // 2
            found = padded_tokens([input_ids[row] for row in rows[:half]])
            self.safe_tokens = found if self.safe_tokens is None else min(found, self.safe_tokens)
            pieces = [piece for part in [rows[:half], rows[half:], *pieces] for piece in self._cut(part, input_ids)]
        return done, len(done) > 1

    def _cut(self, rows: list[int], input_ids: Sequence[NDArray[np.int32]]) -> list[list[int]]:
        fits = self.safe_tokens is None or padded_tokens([input_ids[row] for row in rows]) <= self.safe_tokens
        if fits or len(rows) == 1:
            return [rows]
        half = (len(rows) + 1) // 2
        return self._cut(rows[:half], input_ids) + self._cut(rows[half:], input_ids)

    def _try(self, rows: list[int], input_ids: Sequence[NDArray[np.int32]]) -> HostStates | None:
        """States of one padded batch; None if memory ran out."""
        lengths = tuple(len(input_ids[row]) for row in rows)
        ids_BT = np.zeros((len(rows), max(lengths)), dtype=np.int64)
        for position, row in enumerate(rows):
            ids_BT[position, : lengths[position]] = input_ids[row]
        try:
            states_BTKH = capture_states(
                self.target, torch.from_numpy(ids_BT), self.layer_ids, dtype=torch.bfloat16, last=self.last
            )
            return self._to_host(states_BTKH, lengths)
        except torch.OutOfMemoryError:
            pass
        except RuntimeError as error:
            if "DefaultCPUAllocator" not in str(error):  # how torch tells that memory of the host ran out
                raise
        torch.cuda.empty_cache()  # here, where the error no longer holds the tensors; does nothing without CUDA
        return None

    def _to_host(self, states_BTKH: Tensor, lengths: tuple[int, ...]) -> HostStates:
        if self._stream is None:
            return HostStates(states_BTKH, lengths)
        host_BTKH = torch.empty(states_BTKH.shape, dtype=states_BTKH.dtype, pin_memory=True)
        # A stream of its own: the copy runs beside the next forward.
        self._stream.wait_stream(torch.cuda.current_stream(self.target.device))
        with torch.cuda.stream(self._stream):
            host_BTKH.copy_(states_BTKH, non_blocking=True)
            states_BTKH.record_stream(self._stream)
            copied = self._stream.record_event()
        return HostStates(host_BTKH, lengths, copied)


def padded_tokens(input_ids: Sequence[NDArray[np.int32]]) -> int:
    """Tokens of a batch, padding included: rows x longest row."""
    return len(input_ids) * max(len(ids) for ids in input_ids)


def read_safe_tokens(store: Path) -> int | None:
    """What an earlier start of this extraction learnt about memory; None if nothing."""
    try:
        return int(json.loads((store / MEMORY_NAME).read_text())["safe_padded_tokens"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None  # only a hint: without it memory runs out once more and the hint is made anew


def write_safe_tokens(store: Path, safe_tokens: int) -> None:
    """Remember the batch that fits; the file goes when the store is finished."""
    write_file(store / MEMORY_NAME, [(json.dumps({"safe_padded_tokens": safe_tokens}) + "\n").encode()])
