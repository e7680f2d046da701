"""The glossary's words and no private ones, in code and pages: a failure names file, line and the word to use.

A word stands here once the whole repository, or the rooms named, are free of it. Ordinary English is let through by
`ALLOWED`, which is matched where the word was found, with its neighbours.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KINDS = {".py", ".md", ".js", ".css", ".html", ".c", ".toml"}
ROOMS = tuple(
    "spec schedule cost telemetry planning kernels model data parallel checkpoint resilience generate "
    "training verification launch report probe cli islands".split()
)
"""Those whose words are checked in `IN_ROOMS` too."""

EVERYWHERE = {
    r"pulses?": "heartbeat",
    r"roll ?calls?": "membership, coordinator",
    r"under way": "in flight",
    r"foretells?|foretold": "predicts, predicted",
    r"products": "matmuls",
    r"(joined|bare|under) (products?|matmuls?)|(products?|matmuls?) joined": "fused matmuls; overlapped with matmuls",
    r"go on|goes on|going on|went on": "resume, continue",
    r"the way they went": "update path",
    r"imagined": "fake (collectives)",
    r"keepers?": "checkpointer",
    r"lean": "fused (cross-entropy)",
    r"recalls?": "restore",
}
"""Pattern -> the field's words for it."""
IN_ROOMS = {
    r"exchang\w+": "collective, communicate",
    r"pieces?": "shard, part, chunk",
    r"box|boxes": "slice of a tensor",
    r"turned": "transposed; rotated (RoPE)",
    r"left out|leaves? out|leaving out": "omitted, dropped, default",
    r"put together|puts together": "concatenate, consolidate, gather",
    r"host's memory": "CPU memory",
    r"labelled": "with labels (not ignored)",
    r"in (8|eight) bits": "in fp8",
    r"products?": "matmul",
    r"seats?": "role, place",
    r"shares": "probabilities, parts, fractions",
}
ALLOWED = [
    r"(dot|two|some) products",  # of numbers
    r"precision 0\.\d+, recall",  # of a classifier
    r"from itertools import .*product|product\(",
    r"older runs wrote `exchanges`|told\[\"exchanges\"\]",  # what is still read
    r"shares (a|its|one) (core|card)",  # the verb
    r"box=None",  # of rich
]


def pages() -> list[Path]:
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
    for folder in ("cuboid", "docs", "examples"):
        found += sorted((ROOT / folder).rglob("*"))
    made = {"_build", "reference"}  # by `make docs`, of what is looked at where it stands
    return [path for path in found if path.suffix in KINDS and path.is_file() and not made & set(path.parts)]


def private(path: Path, words: dict[str, str], text: str | None = None) -> list[str]:
    """One line for each word found in its private sense."""
    wrong = []
    for number, line in enumerate((text or path.read_text(encoding="utf-8")).splitlines(), 1):
        allowed = [match.span() for pattern in ALLOWED for match in re.finditer(pattern, line)]
        for pattern, instead in words.items():
            for match in re.finditer(rf"(?<![\w-])({pattern})(?![\w-])", line, re.IGNORECASE):
                if not any(start <= match.start() and match.end() <= end for start, end in allowed):
                    wrong.append(f"{path}:{number}: {match[0]!r}; say {instead}: {line.strip()[:90]}")
    return wrong


def test_no_private_words_anywhere() -> None:
    wrong = [line for path in pages() for line in private(path, EVERYWHERE)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_no_private_words_in_rooms_that_are_done(room: str) -> None:
    files = [path for path in (ROOT / "cuboid" / room).rglob("*") if path.suffix in KINDS]
    wrong = [line for path in files for line in private(path, IN_ROOMS)]
    assert files and not wrong, "\n".join(wrong)


def test_the_check_finds_words_and_lets_plain_english_through() -> None:
    assert private(Path("a"), EVERYWHERE, "the products of a layer")
    assert private(Path("a"), IN_ROOMS, "an exchange of tokens in 8 bits")
    assert not private(Path("a"), EVERYWHERE, "two products that one instruction adds; clean; a lean-to")
    assert not private(Path("a"), IN_ROOMS, "for corner in product(*ends):")
