"""A tiny extraction of many shards: data, config, and a program that runs and kills it in processes of its own.

As a program: ``python small_extraction.py CONFIG FOLDER CASE...`` makes one store per case in forked children, some of
which kill themselves with SIGKILL at a chosen rename, so every place where a crash could tear something can be reached.
"""

import functools
import importlib
import json
import os
import signal
import sys
from pathlib import Path

SHARD_BYTES = 40_000
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "a", "cat", "sat", "down"]


def write_config(folder: Path, target: Path, *, num_rows: int = 40, broken: bool = True, **changes: str) -> Path:
    """Write chats.jsonl and extract.toml; ``changes`` are extra lines by table, e.g. ``store='codec = "none"'``."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": " ".join(WORDS[: 2 + number % 9])},
                {"role": "assistant", "content": " ".join(WORDS * (1 + number % 5)) + str(number)},
            ]
        }
        for number in range(num_rows)
    ]
    lines = [json.dumps(row) for row in rows]
    if broken:
        lines += ["{broken", json.dumps({"messages": []})]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    tables = {
        "target": f'model = "{target}"\ndtype = "float32"\ndevice = "cpu"\nnum_target_features = 3',
        "data": 'sources = ["chats.jsonl"]\nmax_tokens = 256\nvalidation_fraction = 0.25',
        "buckets": "count = 3",
        "forward": "token_budget = 200\nthreads = 1",
        "store": "",
    }
    for table, lines_of_table in changes.items():
        tables[table] = f"{tables[table]}\n{lines_of_table}"
    path = folder / "extract.toml"
    path.write_text("".join(f"[{name}]\n{content}\n\n" for name, content in tables.items()))
    return path


def use_small_shards() -> None:
    """Let this process cut stores into shards of a few kilobytes."""
    from dflash_tools.store import layout

    layout.MIN_SHARD_BYTES = SHARD_BYTES


def count_renames(path: Path) -> None:
    """Write the number of renames that this process makes to a file, when it ends."""
    rename, seen = Path.rename, 0

    def counted(source: Path, target: Path) -> Path:
        nonlocal seen
        seen += 1
        path.write_text(str(seen))
        return rename(source, target)

    Path.rename = counted


def kill_at_rename(count: int) -> None:
    """Kill this process just before the given rename, counted from 1, and leave a torn temp file behind."""
    rename, seen = Path.rename, 0

    def counted(source: Path, target: Path) -> Path:
        nonlocal seen
        seen += 1
        if seen == count:
            os.truncate(source, source.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(source, target)

    Path.rename = counted


def start(config: Path, store: Path, *, prepare=lambda: None, rank: int = 0, world_size: int = 1) -> int:
    """Extract in a forked child; returns its process id."""
    from dflash_tools.config import ExtractConfig, load_config
    from dflash_tools.extract.run import run_extraction

    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        prepare()
        run_extraction(load_config(config, ExtractConfig), config.parent, store)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(child: int) -> int:
    """Exit code of a child; minus the signal if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Make a reference store and one more for every remaining argument; print exit codes as JSON.

    ``0.4`` kills at 40 % of all renames and resumes; ``ranks:2`` uses two processes; ``ranks:2:0.4`` kills the first
    of them at 40 % of all renames, lets the other end, and resumes with one process.
    """
    use_small_shards()
    # Imported once here, so that the children, which are forked, need not.
    importlib.import_module("dflash_tools.extract.run")
    importlib.import_module("transformers.models.llama.modeling_llama")
    importlib.import_module("transformers.models.auto.modeling_auto")
    config, folder = Path(sys.argv[1]), Path(sys.argv[2])
    codes = {
        "reference": [finish(start(config, folder / "reference", prepare=lambda: count_renames(folder / "count")))]
    }
    num_renames = int((folder / "count").read_text())
    for case in sys.argv[3:]:
        store = folder / case
        if not case.startswith("ranks"):
            point = 1 + int(float(case) * num_renames)
            killed = finish(start(config, store, prepare=lambda point=point: kill_at_rename(point)))
            codes[case] = [killed, finish(start(config, store))]
            continue
        world_size = int(case.split(":")[1])
        fraction = float(case.split(":")[2]) if case.count(":") == 2 else None
        killer = functools.partial(kill_at_rename, 1 + int((fraction or 0) * num_renames))
        children = [
            start(
                config,
                store,
                prepare=killer if rank == 0 and fraction is not None else int,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]
        codes[case] = [finish(child) for child in children]
        if fraction is not None:
            codes[case].append(finish(start(config, store)))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
