"""Ranks that really run out of memory: what they say, and that what they advise helps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cuboid.launch import oom
from cuboid.launch.oom import SIZE, OutOfMemory, _sentence, _told, out_of_memory_in
from cuboid.spec.run import build_run
from cuboid.telemetry.heartbeat import Heartbeat
from tests.cli.command import SHORT, run, train

FIELDS = ["training.steps=1", "training.global_batch=64", "training.sequence=256"]
ROOM = "600"
"""MiB beyond what a process has with torch alone: the activations of 64 sequences need more, those of 32 less."""


def test_what_is_advised_helps(tmp_path: Path) -> None:
    def limited(layout: str) -> tuple[int, str]:
        settings = [part for field in (*FIELDS, "training.device=cpu") for part in ("--set", field)]
        finished = run(["-m", "tests.launch.limited", ROOM, "train", "--layout", layout, *settings], tmp_path)
        return finished.returncode, finished.stderr

    code, told = limited("micro_batch=64")
    assert code == 2 and told.count("\n") == 1, "one line and no traceback"
    assert re.match(
        r"error: rank 0 of dp=1,tp=1,pp=1,micro_batch=64 ran out of memory in step 1 \((forward|backward) of stage 0, "
        r"micro-batch 0\): it wanted [\d.]+ [MG]iB more and .* of [\d.]+ [MG]iB was left; held: ",
        told,
    )
    held = re.findall(r"([a-z ]+) [\d.]+ [MG]iB", told.split("held: ")[1].split(";")[0])
    assert [kind.strip() for kind in held[:2]] == ["other", "optimizer"], "nobody counted activations"
    assert "activations" not in told
    advice = re.search(
        r"; (\S+) in the layout frees [\d.]+ [MG]iB by the planner's memory model, which is enough", told
    )
    assert advice is not None, told
    assert "UserError: rank 0" in (tmp_path / "runs/default/failure-00000.txt").read_text().splitlines()[-1]
    # A change of one field is the smallest there is; a field named twice is refused, so it replaces the old one.
    changed = advice[1] if advice[1].startswith("micro_batch=") else f"micro_batch=64,{advice[1]}"
    assert limited(changed) == (0, "")


def test_one_rank_of_four(tmp_path: Path) -> None:
    """It is named though all four fail, and the run does not start again: it would only happen again."""
    options = ["--layout", "dp=2,pp=2", "--inject", "oom rank=3 step=2"]
    finished = run(train(*options, fields=[*SHORT, "checkpoint.every=1"]), tmp_path)
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1, finished.stderr
    assert finished.stderr.startswith("error: rank 3 of dp=2,tp=1,pp=2 ran out of memory in step 2: it wanted ")
    assert "not enough: use more ranks too" in finished.stderr, "nothing can hold what was asked for"


def test_before_anything_is_computed_no_stage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "HEARTBEAT", Heartbeat())
    lack = OutOfMemory(asked=2**30, used=2**30, limit=2**30, held={})
    told = _sentence(build_run({"model": "tiny-llama"}), 0, torch.device("cpu"), lack)
    assert told.startswith("rank 0 of dp=1,tp=1,pp=1 ran out of memory in set-up: it wanted 1.00 GiB more")


def test_what_torch_says_of_a_gpu() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 12.31 GiB "
        "is free. Including non-PyTorch memory, this process has 127.48 GiB memory in use. Of the allocated memory "
        "120.00 GiB is allocated by PyTorch, with 40.00 MiB allocated in private pools (e.g., CUDA Graphs), and 6.50 "
        "GiB is reserved by PyTorch but unallocated."
    )
    assert _told(rf"Tried to allocate {SIZE}", message) == 20 * 2**30
    assert _told(rf"of which {SIZE} is free", message) == 12.31 * 2**30
    assert _told(rf"{SIZE} is allocated by PyTorch", message) == 120 * 2**30
    assert _told(rf"{SIZE} is reserved by PyTorch but unallocated", message) == 6.5 * 2**30


def test_lack_of_memory_is_known_through_what_wraps_it() -> None:
    try:
        try:
            torch.empty(1 << 62, dtype=torch.uint8)
        except RuntimeError as error:
            raise ValueError("while something was computed") from error
    except ValueError as error:
        assert "DefaultCPUAllocator" in str(out_of_memory_in(error))
    assert out_of_memory_in(MemoryError()) is not None and out_of_memory_in(RuntimeError("shapes differ")) is None
