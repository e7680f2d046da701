"""A command of Cuboid in a process that may have so many MiB more memory than it has once torch is there.

python -m tests.launch.limited 350 train --layout micro_batch=64
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import cuboid.launch.rank  # noqa: F401  (torch, and all that a rank imports)
from cuboid.cli.main import main

if __name__ == "__main__":
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (int(sys.argv[1]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.exit(main(sys.argv[2:]))
