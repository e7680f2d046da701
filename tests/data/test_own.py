"""Data sets of one's own: streams give every sample once wherever a run stops and on whatever layout it continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cuboid.checkpoint.folder import checkpoint_path
from cuboid.data.loader import micro_batches
from cuboid.data.opened import check_data, data_identity
from cuboid.data.own import Stream
from cuboid.data.source import make_source, make_validation_source
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run, build_run
from tests.parallel.cases import assert_equal

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = """
import itertools
import torch

def stream(count=10):
    for place in range(count):
        tokens = (torch.arange(8) + place) % 259
        yield {"tokens": tokens, "labels": tokens.roll(-1).where(tokens % (2 + place % 3) > 0, -100)}

class Words:
    '''Samples are words; only the collator makes tensors of them.'''
    def __iter__(self):
        yield from ("hello you", "other ha", "wordings")
    def collate(self, samples):
        tokens = torch.tensor([list(word.encode().ljust(8)[:8]) for word in samples])
        return {"tokens": tokens, "labels": tokens}

class Listed:
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((8,), index), torch.full((8,), index)

def chance():
    while True:
        yield {"tokens": torch.randint(259, (8,)), "labels": torch.randint(259, (8,))}

def empty():
    return iter(())

def number():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"python:{tmp_path}/own.py:"


def run_of(layout: str, *settings: str) -> Run:
    table = {"model": f"python:{EXAMPLES / 'own_attention.py'}:build", "layout": layout}
    small = ["training.sequence=8", "training.global_batch=4", "training.precision=float64", "training.device=cpu"]
    return build_run(table, [*small, *settings])


class Counted:
    """A stream that says how often it was read."""

    reads = 0

    def __init__(self, start: int = 0) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        for place in range(self._start, 7):
            Counted.reads += 1
            yield torch.tensor([place]), torch.tensor([place])


class Skipping(Counted):
    def skip(self, count: int) -> Skipping:
        return Skipping(self._start + count)


def numbers(source: Stream, places: list[int]) -> list[int]:
    found = []
    for place in places:
        sample = source.at(place)
        assert not isinstance(sample, dict)
        found.append(int(sample[0]))
    return found


@pytest.mark.parametrize("kind", [Counted, Skipping])
def test_a_position_of_a_stream_is_the_same_sample_however_it_is_reached(kind: type[Counted]) -> None:
    asked = [0, 1, 5, 3, 9, 2, 22, 21, 13, 6]
    source = Stream(kind, "mine", recent=2)
    assert numbers(source, asked) == [place % 7 for place in asked]
    for place in (0, 6, 7, 30):
        assert numbers(Stream(kind, "mine", recent=2), [place]) == [place % 7]


def test_what_was_just_seen_is_not_read_again_and_skipping_reads_nothing() -> None:
    source = Stream(Counted, "mine", recent=4)
    Counted.reads = 0
    assert numbers(source, [0, 1, 0, 1, 2]) == [0, 1, 0, 1, 2]
    assert Counted.reads == 3
    Counted.reads = 0
    assert numbers(Stream(Skipping, "mine", recent=1), [5]) == [5]
    assert Counted.reads == 1


def test_replicas_share_a_stream_without_losing_or_repeating_a_sample(own: str) -> None:
    whole = run_of("dp=1", f"data.source={own}stream")
    split = run_of("dp=2,micro_batch=2", f"data.source={own}stream")
    device = torch.device("cpu")
    for step in range(4):
        expected = [batch.tokens for batch in micro_batches(make_source(whole), whole, step, 0, device)]
        seen = [
            batch.tokens
            for replica in range(2)
            for batch in micro_batches(make_source(split), split, step, replica, device)
        ]
        assert torch.equal(torch.cat(expected), torch.cat(seen))


def test_a_stream_is_proven_like_other_data(pool: Pool, own: str) -> None:
    settings = (f"data.source={own}stream", "training.steps=2", "training.gradient_clip=0.5")
    assert_equal(pool, run_of("dp=2,tp=2,pp=2", *settings))


def test_a_stream_continues_on_another_layout(pool: Pool, own: str, tmp_path: Path) -> None:
    common = (f"data.source={own}stream", "training.steps=6")
    alone = run_of("dp=1", *common)
    expected = pool.run("tests.checkpoint.jobs:train_part", (alone, str(tmp_path / "one"), 0, 6, None), ranks=1)[0]
    seen: list[float] = []
    source: str | None = None
    for done, layout in ((0, "dp=2,zero=3"), (2, "pp=2"), (4, "dp=4")):
        run = run_of(layout, *common)
        arguments = (run, str(tmp_path / "many"), done, done + 2, source)
        seen += pool.run("tests.checkpoint.jobs:train_part", arguments, ranks=run.layout.world_size)[0]
        source = str(checkpoint_path(tmp_path / "many", done + 2))
    assert seen == pytest.approx(expected, rel=1e-9)


def test_a_training_evaluates_on_data_of_its_own_and_keeps_checkpoints(pool: Pool, own: str, tmp_path: Path) -> None:
    run = run_of(
        "dp=2",
        f"data.source={own}Words",
        f"data.validation={own}Listed",
        "evaluation.every=1",
        "training.steps=2",
        "checkpoint.every=2",
        f"output.folder={tmp_path / 'run'}",
    )
    check_data(run)
    source, length = make_validation_source(run)
    assert length == 8
    assert sorted(int(source.at(place)[0][0]) for place in range(8)) == list(range(8))  # type: ignore[index]
    pool.run("tests.training.cases:train_rank", (run,), ranks=2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["validation_loss"] > 0 for row in rows)
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_of_a_stream_the_first_batches_are_evaluated(own: str) -> None:
    run = run_of("dp=1", f"data.validation={own}stream", "evaluation.every=1", "evaluation.batches=2")
    _, length = make_validation_source(run)
    assert length == 8


def test_identities_tell_data_sets_apart(own: str) -> None:
    names = [f"data.source={own}{name}" for name in ("stream", "Words", "Listed")]
    assert len({data_identity(run_of("dp=1", name)) for name in names}) == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["data.source=OWNchance"], "begins with another sample each time"),
        (["data.source=OWNempty"], "has no samples; give it one at least"),
        (["data.source=OWNnumber"], "is int; give it `__len__` and `__getitem__`, or `__iter__`"),
        (["data.source=OWNstream", "data.validation_fraction=0.1"], "cannot be held out in part"),
        (["data.validation=model", "evaluation.every=1"], r"Model\(evaluation_data=…\)"),
        (["data.validation=OWNstream", "evaluation.every=1"], "has 10 samples, .* use evaluation.batches=2"),
    ],
)
def test_what_cannot_work_is_refused(own: str, settings: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        check_data(run_of("dp=1", *(setting.replace("OWN", own) for setting in settings)))
