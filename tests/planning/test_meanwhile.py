"""Half of a question in a second process: the same answer, and the same refusal."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from cuboid.errors import UserError
from cuboid.planning.meanwhile import meanwhile

def refuse():
    raise UserError("nothing fits; use more memory")

def end():
    if os.getpid() != mine:
        os._exit(3)
    return "computed here"

mine = os.getpid()
with meanwhile(lambda: (os.getpid(), sum(range(10)))) as answer:
    process, found = answer()
assert found == 45
print("another process" if process != mine else "this process")
with meanwhile(end) as answer:
    print(answer())
with meanwhile(lambda: lambda: 1) as answer:
    assert answer()() == 1, "what cannot be sent is computed here"
with meanwhile(lambda: [1] * 10_000_000) as answer:
    pass
try:
    with meanwhile(refuse) as answer:
        answer()
except UserError as reason:
    print(reason)
"""


@pytest.mark.parametrize("cores", [1, 2])
def test_answers_and_refusals(cores: int) -> None:
    mine = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {mine})\n{SCRIPT}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    who = "another process" if len(mine) > 1 else "this process"
    assert done.stdout.splitlines() == [who, "computed here", "nothing fits; use more memory"]
