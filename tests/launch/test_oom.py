"""Ranks that really run out of memory: what they say, and that what they advise helps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cuboid.errors import RankError, UserError
from cuboid.launch import oom
from cuboid.launch.oom import SIZE, OutOfMemory, _advice, _sentence, _told, out_of_memory_in, told_when_short
from cuboid.spec.run import Run, build_run
from cuboid.telemetry.heartbeat import Heartbeat
from cuboid.training.memory import exhaust
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


def job(layout: str = "dp=1", *overrides: str) -> Run:
    return build_run({"model": "tiny-llama", "layout": layout, "training": {"device": "cpu"}}, overrides)


def test_memory_in_small_blocks_is_no_matter_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    lack = OutOfMemory(asked=2**30, used=2**32, limit=2**33, held={}, unused=2**31)
    told = _advice(job(), 0, torch.device("cuda"), lack)
    assert told == (
        "2.00 GiB of it lie unused in blocks that are too small: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "in blocks" not in _advice(job(), 0, torch.device("cuda"), lack), "it is set, and did not help"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    large = OutOfMemory(asked=2**32, used=2**32, limit=2**33, held={}, unused=2**31)
    assert "in blocks" not in _advice(job(), 0, torch.device("cuda"), large), "all of them together would not do"


def test_where_nothing_can_be_changed_more_ranks_are_the_advice() -> None:
    lack = OutOfMemory(asked=2**20, used=2**33, limit=2**33, held={})
    told = _advice(job("dp=1,recompute=full"), 0, torch.device("cpu"), lack)
    assert told == "nothing is left to change in its layout: use more ranks, or a smaller model or sequence"


def test_what_is_free_is_not_said_to_be_too_little_where_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has given some back since, or it lies in small blocks."""
    monkeypatch.setattr(oom, "HEARTBEAT", Heartbeat())
    kinds = {"parameters": 2.0**29, "gradients": 2.0**31, "optimizer": 2.0**10}
    lack = OutOfMemory(asked=2**28, used=2**32, limit=2**33, held=kinds)
    told = _sentence(job(), 0, torch.device("cpu"), lack).split("; ")
    assert told[0].endswith("it wanted 0.25 GiB more and less than that of 8.00 GiB was left")
    assert told[1] == "held: gradients 2.00 GiB, parameters 0.50 GiB", "the largest first, and nothing below 1 MiB"
    unknown = OutOfMemory(asked=None, used=2**33, limit=2**33, held={})
    assert "it wanted more and 0.0 MiB of 8.00 GiB was left" in _sentence(job(), 0, torch.device("cpu"), unknown)


def test_a_run_that_has_made_steps_may_start_again_and_another_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> None:
        with told_when_short(job(), 0, torch.device("cpu")):
            exhaust(torch.device("cpu"))

    heartbeat = Heartbeat()
    monkeypatch.setattr(oom, "HEARTBEAT", heartbeat)
    with pytest.raises(UserError, match=r"^rank 0 of dp=1,tp=1,pp=1 ran out of memory in set-up: it wanted "):
        short()
    for step in (1, 2, 3):
        heartbeat.enter("step", step)
    with pytest.raises(RankError, match=r"^rank 0 of dp=1,tp=1,pp=1 ran out of memory in step 3: it wanted ") as told:
        short()
    assert "DefaultCPUAllocator" in str(told.value.__cause__), "the traceback says where"
    with pytest.raises(ValueError, match=r"^another matter$"), told_when_short(job(), 0, torch.device("cpu")):
        raise ValueError("another matter")


def test_what_a_process_had_before_the_model_is_kept_apart() -> None:
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 3.00 GiB. Error code 12"
    lack = OutOfMemory.on(torch.device("cpu"), message, before=5.0)
    assert (lack.asked, lack.base) == (3 * 2**30, 5.0)
    assert 0 < lack.used < lack.limit
    assert sum(lack.held.values()) == pytest.approx(lack.used), "every byte is some kind's"
