"""Tokens per second of `cuboid data build` against the tokenizers library alone on the same cores, side by side.

    python benchmarks/data.py [--megabytes 32] [--rounds 3] [--workers 2] [--json]

The library alone has all documents in memory and throws its tokens away; the build reads JSON Lines, writes the store
and checksums it. Every round runs one and then the other, each in a process of its own; medians are reported. Where
other programs take the cores away, seconds of CPU (for the build: all of it, start and imports included) tell more than
seconds of the clock."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from cuboid.data.opened import open_source

ALONE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2])]
start, cpu = time.perf_counter(), time.process_time()
tokens = len(texts)
for first in range(0, len(texts), 1000):
    tokens += sum(map(len, tokenizer.encode_batch_fast(texts[first:first + 1000], add_special_tokens=False)))
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({"tokens": tokens, "tokens_per_second": tokens / seconds, "cpu_seconds": cpu}))
"""


def documents() -> Iterator[str]:
    """Python's own source, again and again, in pieces of the size of web pages."""
    tokens = open_source("python-stdlib").tokens
    for index in cycle(range(tokens.documents)):
        text = bytes(tokens.document(index)[:-1].astype("uint8")).decode(errors="replace")
        yield from (text[start : start + 5000] for start in range(0, len(text), 5000))


def prepare(folder: Path, megabytes: int, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    size = 0
    sample: list[str] = []
    with (folder / "corpus.jsonl").open("w") as file:
        for text in documents():
            if size >= megabytes << 20:
                break
            size += file.write(json.dumps({"text": text}) + "\n")
            if len(sample) < 600:
                sample.append(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def alone(folder: Path, workers: int) -> dict[str, float]:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    arguments = [str(folder / "tokenizer.json"), str(folder / "corpus.jsonl")]
    return run([sys.executable, "-c", ALONE, *arguments], environment)


def built(folder: Path, workers: int, number: int) -> dict[str, float]:
    arguments = [str(folder / "corpus.jsonl"), "-o", str(folder / f"store{number}"), "--json"]
    options = ["--tokenizer", str(folder / "tokenizer.json"), "--workers", str(workers)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = run([sys.executable, "-m", "cuboid.cli.main", "data", "build", *arguments, *options], dict(os.environ))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**found, "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    finished = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(finished.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ours, theirs, whole, cpu = [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options.megabytes, options.vocabulary)
        for number in range(options.rounds):
            library, store = alone(folder, options.workers), built(folder, options.workers, number)
            assert library["tokens"] == store["tokens"], "the store does not hold what the library says"
            theirs.append(library["tokens_per_second"])
            ours.append(store["tokens_per_second"])
            whole.append(store["tokens"] / store["seconds"])
            cpu.append(library["cpu_seconds"] / store["cpu_seconds"])
    summary = {
        "workers": options.workers,
        "tokens": store["tokens"],
        "library_tokens_per_second": statistics.median(theirs),
        "build_tokens_per_second": statistics.median(ours),
        "build_tokens_per_second_with_publishing": statistics.median(whole),
        "ratio": statistics.median(mine / other for mine, other in zip(whole, theirs, strict=True)),
        "cpu_ratio": statistics.median(cpu),
    }
    if options.json:
        print(json.dumps(summary))
        return
    print(f"library alone   {summary['library_tokens_per_second']:12,.0f} tokens/s on {options.workers} cores")
    print(f"data build      {summary['build_tokens_per_second']:12,.0f} tokens/s until the last part")
    print(f"with publishing {summary['build_tokens_per_second_with_publishing']:12,.0f} tokens/s")
    print(f"ratio           {summary['ratio']:12.2f}   (0.8 or more is asked)")
    print(f"ratio of CPU    {summary['cpu_ratio']:12.2f}")


if __name__ == "__main__":
    main()
