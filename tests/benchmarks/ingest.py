"""How fast rows become samples: reading alone, the tokenizer alone, all together; and the memory it takes.

Run: python tests/benchmarks/ingest.py [--rows 20000] [--repeats 5]
"""

import argparse
import gzip
import json
import os
import platform
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread per process: figures are per core.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sat", "on", "mat", "while", "it"]


def make_rows(count: int) -> Iterator[dict]:
    """Short conversations: a question of about 10 words, an answer of about 15."""
    random_words = random.Random(0)
    for number in range(count):
        question = " ".join(random_words.choices(WORDS, k=random_words.randint(5, 15)))
        answer = " ".join(random_words.choices(WORDS, k=random_words.randint(10, 20)))
        yield {
            "messages": [
                {"role": "user", "content": f"{number} {question}"},
                {"role": "assistant", "content": answer},
            ]
        }


def write_files(folder: Path, count: int) -> dict[str, Path]:
    import pyarrow
    import pyarrow.parquet

    rows = list(make_rows(count))
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {
        "JSON lines": folder / "a.jsonl",
        "JSON array": folder / "a.json",
        "gzip": folder / "a.jsonl.gz",
        "zstd": folder / "a.jsonl.zst",
        "Parquet": folder / "a.parquet",
    }
    files["JSON lines"].write_bytes(lines)
    files["JSON array"].write_text(json.dumps(rows))
    files["gzip"].write_bytes(gzip.compress(lines))
    with pyarrow.OSFile(str(files["zstd"]), "wb") as sink, pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(lines)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), files["Parquet"])
    return files


def measure(action: Callable[[], int], repeats: int, clock: Callable[[], float]) -> str:
    """Give rows per second of each repeat: min / median / max."""
    rates = []
    for _ in range(repeats):
        started = clock()
        count = action()
        rates.append(count / (clock() - started))
    return f"{min(rates):9,.0f} {statistics.median(rates):9,.0f} {max(rates):9,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    from tiny_models import SMOLLM2, make_tiny_tokenizer

    from dflash_tools.config import DataSection
    from dflash_tools.data import load_tokenizer, read_rows, resolve_data
    from dflash_tools.data.sources import read_source

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_files(folder, arguments.rows)
        make_tiny_tokenizer(folder / "tiny")
        tokenizers = {"SmolLM2, 49k ids": load_tokenizer(**SMOLLM2), "tiny, 320 ids": load_tokenizer(name + "/tiny")}
        print(f"{platform.python_version()}, {arguments.rows} rows, rows/s: min, median, max of {arguments.repeats}")

        for kind, path in files.items():
            data = resolve_data(DataSection(sources=(path.name,)), folder)
            count = measure(
                lambda data=data: sum(1 for _ in read_source(data.sources[0])), arguments.repeats, time.process_time
            )
            print(f"read {kind:31} per core {count}")
        data = resolve_data(DataSection(sources=("a.jsonl",)), folder)
        for title, tokenizer in tokenizers.items():
            texts = [
                text
                for row in make_rows(arguments.rows)
                for text in (
                    tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True),
                    row["messages"][1]["content"] + "<|im_end|>\n",
                )
            ]

            def encode(texts=texts, tokenizer=tokenizer) -> int:
                for start in range(0, len(texts), 512):
                    tokenizer.backend_tokenizer.encode_batch(texts[start : start + 512], add_special_tokens=False)
                return len(texts) // 2

            def read(tokenizer=tokenizer) -> int:
                return sum(1 for _ in read_rows(data, tokenizer, num_processes=1))

            print(f"tokenizer alone, {title:19} per core {measure(encode, arguments.repeats, time.process_time)}")
            rate = measure(read, arguments.repeats, time.process_time)
            print(f"rows to samples, {title:19} per core {rate}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"peak memory of this process: {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
