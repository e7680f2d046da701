"""Islands: what they learn, what a slow link costs them, and what faults do to them.

    python benchmarks/islands.py learning --steps 200        # losses beside data parallelism's at equal tokens
    python benchmarks/islands.py links                       # hosts with limited links, beside the planner; needs root
    python benchmarks/islands.py faults --faults 30          # islands killed, the deciding one too; needs root

Each prints a line of JSON for each run as it comes, and appends it to the file of `--json`; `learning --help` and the
others say more."""

from __future__ import annotations

import sys
from importlib import import_module

KINDS = ("learning", "links", "faults")


def main() -> None:
    words = sys.argv[1:]
    if not words or words[0] not in KINDS:
        print(__doc__)
        raise SystemExit(0 if words[:1] in (["--help"], ["-h"]) else 2)
    import_module(f"islands_{words[0]}").main(words[1:])


if __name__ == "__main__":
    main()
