"""A training of four ranks, killed at every file event of a save, and going on each time as if it never stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cuboid.checkpoint.folder import newest_whole
from cuboid.errors import RankError
from cuboid.launch.pool import Pool
from cuboid.spec.run import Run, dump_run, load_run
from cuboid.training.run_folder import prepare_folder
from tests.checkpoint.events import Death, Event
from tests.checkpoint.jobs import SMALL
from tests.checkpoint.kill_jobs import RANKS
from tests.training.cases import short_run

CUTS = (0.5, 0.99)
"""How much of a torn write reaches the file."""


class Torture:
    """One training, killed again and again. Each life begins at the newest checkpoint, saves once in peace and is
    killed during or after its second save; a checkpoint is kept after every step."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.folder, self.layout, self.lives = folder, layout, 0
        self.pool = Pool()
        (folder / "marks").mkdir(parents=True)
        self.told: list[list[float]] = []
        """The losses that stood in the run's rows after each life."""

    def run(self, steps: int, folder: str = "run") -> Run:
        overrides = (*SMALL, f"training.steps={steps}", "training.global_batch=4", "training.sequence=8")
        overrides += ("learning_rate.schedule=constant", "checkpoint.every=1", "checkpoint.keep=2")
        return short_run(self.layout, str(self.folder / folder), *overrides, "data.source=synthetic")

    def assert_it_never_took_another_way(self) -> None:
        """In no life, also where a later one has trained the same steps again."""
        run = self.run(max(map(len, self.told)), "whole")
        run = replace(run, checkpoint=replace(run.checkpoint, every=0))
        self.pool.run("tests.training.cases:train_rank", (run,), ranks=RANKS)
        expected = losses(self.folder / "whole")
        for life, told in enumerate(self.told, 1):
            assert told == expected[: len(told)], f"the training took another way in life {life}"

    def begin(self) -> list[tuple[list[Event], dict[str, int]]]:
        """Until each life is like the one before it; returns what every rank does in one."""
        self.live({})
        seen = self.live({})
        assert [missed for _, missed in seen] == [{}] * RANKS, "a change to a file went unseen"
        return seen

    @property
    def newest(self) -> int:
        """Every checkpoint there is verifies, whatever happened."""
        _, manifest, damaged = newest_whole(self.folder / "run" / "checkpoints")
        assert not damaged
        return 0 if manifest is None else manifest.step

    def live(self, deaths: dict[int, Death]) -> list[tuple[list[Event], dict[str, int]]]:
        """A life; what each rank saw, if it was not killed."""
        begin = self.newest
        self.lives += 1
        mark = self.folder / "marks" / str(self.lives)
        arguments = (self.run(begin + 3), begin, deaths, str(mark))
        seen: list[Any] = []
        try:
            seen = self.pool.run("tests.checkpoint.kill_jobs:life", arguments, ranks=RANKS, timeout=300)
        except RankError as error:
            assert mark.exists(), f"it ended otherwise: {error}"
        self.pool.close()  # processes that are watched already are used no more
        assert mark.exists() == bool(deaths), f"{deaths} did not happen"
        self.told.append(losses(self.folder / "run"))
        assert len(self.told[-1]) >= self.newest, "steps that are not done again have lost their rows"
        return seen


def losses(folder: Path) -> list[float]:
    """Of steps 1, 2, 3, …; a row that was being written when its process was killed is not counted."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.fixture
def torture(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Torture]:
    torture = Torture(tmp_path, request.param)
    yield torture
    torture.pool.close()


class Point(NamedTuple):
    rank: int
    event: Event
    written: float | None
    saved: int
    """How many of the steps of a life must be kept by then."""


def points(seen: list[tuple[list[Event], dict[str, int]]]) -> list[Point]:
    """Every event before the first save, in and after the second, and after the last; each before it happens and, where
    it is a write, when a part of it has happened."""
    found: list[Point] = []
    for rank, (events, _) in enumerate(seen):
        first, second, third = (
            min(index for index, event in enumerate(events) if f".step+{step}.writing" in event.name)
            for step in (1, 2, 3)
        )
        last = max(index for index, event in enumerate(events) if "checkpoints" in event.name) + 1
        for part, saved in ((events[:first], 0), (events[second:third], 1), (events[last:], 3)):
            for event in filter(happens_in_every_life, part):
                found.append(Point(rank, event, None, saved))
                found += [Point(rank, event, cut, saved) for cut in CUTS if event.kind == "write"]
    return found


def happens_in_every_life(event: Event) -> bool:
    """A first row of memory is always written, another only if the process happens to have grown."""
    return not (event.name.startswith("memory-") and event.kind == "write" and event.occurrence > 0)


def some_of(every: list[Point]) -> list[Point]:
    """All that rank 0 does, and all that the others do, which do the same: each of them dies at every third of it.
    A write is torn once, here or there."""
    found: list[Point] = []
    for first in (True, False):
        part = [point for point in every if (point.rank == 0) == first]
        whole = [point for point in part if point.written is None]
        found += (
            whole
            if first
            else [
                point
                for rank in range(1, RANKS)
                for index, point in enumerate(point for point in whole if point.rank == rank)
                if index % 3 == rank - 1
            ]
        )
        torn = [point for point in part if point.written is not None and point.rank in (0, RANKS - 1)]
        found += [point for index, point in enumerate(torn) if point.written == CUTS[index // len(CUTS) % len(CUTS)]]
    return found


@pytest.mark.parametrize("torture", ["dp=2,tp=2,zero=1"], indirect=True)
def test_killed_at_every_file_event_it_goes_on(torture: Torture, thorough: bool) -> None:
    seen = torture.begin()
    tried = points(seen)
    if not thorough:
        tried = some_of(tried)
    for number, point in enumerate(tried):
        before = torture.newest
        torture.live({point.rank: Death(point.event, point.written, with_all=number % 2 == 1)})
        assert torture.newest >= before + point.saved, f"more than one interval is lost at {point}"
    torture.assert_it_never_took_another_way()
    kinds = {point.event.kind for point in tried}
    print(f"killed at {len(tried)} points, {torture.newest} steps in {torture.lives} lives")
    assert kinds == {"open", "write", "fsync", "rename", "mkdir", "remove", "rmdir"}
    assert {point.rank for point in tried} == set(range(RANKS))
    assert len(tried) >= 40


@pytest.mark.parametrize("torture", ["dp=2,pp=2,zero=3"], indirect=True)
def test_killed_in_its_first_save_and_again_while_it_sweeps_up(torture: Torture) -> None:
    torn = Event("write", "checkpoints/.step+1.writing/data-00002.bin", 0)
    torture.live({2: Death(torn, 0.5)})
    assert torture.newest == 0
    for name, kind in (("data-00000.bin", "remove"), ("", "rmdir")):
        swept = Event(kind, f"checkpoints/.step+1.writing/{name}".rstrip("/"), 0)
        torture.live({0: Death(swept)})
        assert torture.newest == 0
    torture.live({0: Death(Event("rename", "checkpoints/step+2", 0))})
    assert torture.newest == 1
    torture.live({})
    assert torture.newest == 4
    torture.assert_it_never_took_another_way()
    assert not [path for path in (torture.folder / "run" / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_while_it_claims_its_folder(tmp_path: Path, written: Path, overwrite: bool) -> None:
    """The file of the run, and what stands in the way of it where it is started anew."""
    run = short_run("dp=1", str(tmp_path / "runs" / "one"))
    folder = Path(run.output.folder)

    def used() -> None:
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        if overwrite:
            shutil.copytree(written, folder / "checkpoints" / written.name)
            (folder / "run.toml").write_text(dump_run(short_run("dp=1", str(folder), "training.seed=7")))
            (folder / "metrics.jsonl").write_text("{}\n")

    with Pool() as pool:
        used()
        [(events, missed)] = pool.run("tests.checkpoint.kill_jobs:prepare", (run, overwrite, None, ""), ranks=1)
        assert missed == {} and len(events) >= (12 if overwrite else 4)
        pool.close()
        for number, event in enumerate(events):
            used()
            mark = tmp_path / f"mark-{number}"
            arguments = (run, overwrite, Death(event), str(mark))
            with pytest.raises(RankError):
                pool.run("tests.checkpoint.kill_jobs:prepare", arguments, ranks=1)
            assert mark.exists()
            prepare_folder(run, overwrite)
            assert load_run(folder / "run.toml") == run
