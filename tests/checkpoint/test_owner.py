"""Two runs that name one `checkpoint.folder` never mix their checkpoints there, whatever kind of store it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any
from uuid import uuid4

import pytest

from cuboid.checkpoint.folder import checkpoints, step_of
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import read_manifest
from cuboid.checkpoint.memory.folder import write_identity
from cuboid.checkpoint.owner import FIRST, Claims, newest_claims, own, read_owner
from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.pool import Pool
from cuboid.readers import parse_toml
from cuboid.spec.run import Run, build_run, dump_run
from cuboid.training.claim import claimed
from cuboid.training.run_folder import prepare_folder
from tests.training.cases import short_run, train_rank


@pytest.fixture(params=["path", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kinds = {"path": str(tmp_path / "kept"), "file": f"file://{tmp_path}/kept", "memory": f"memory://{uuid4().hex}"}
    return kinds[request.param]


def made(tmp_path: Path, name: str, store: str, *fields: str, layout: str = "dp=1") -> Run:
    common = ("training.steps=4", "checkpoint.every=2", f"checkpoint.folder={store}")
    return short_run(layout, str(tmp_path / name), *common, *fields)


def taken_over(run: Run) -> None:
    """Without a look at what the other trains."""
    claim = own(run, locate(run.checkpoint.folder))
    assert claim is not None
    Path(run.output.folder).mkdir(exist_ok=True)
    write_identity(run, claim.identity)
    claim.keep()


def held(store: str) -> list[tuple[int, float]]:
    """Steps, and the learning rate of the run that saved each."""
    found: list[Location] = checkpoints(locate(store))
    runs = [build_run(parse_toml(read_manifest(each).run)) for each in found]
    return [(step_of(each), run.learning_rate.peak) for each, run in zip(found, runs, strict=True)]


def test_another_run_is_refused_and_the_first_unharmed(tmp_path: Path, store: str) -> None:
    first = made(tmp_path, "first", store)
    prepare_folder(first)
    train_rank(0, first)
    second = made(tmp_path, "second", store, "learning_rate.peak=1e-2", "training.steps=6")
    sentence = r"is that of the run in .*/first of host .*, and learning_rate.peak=0.01 is not its 0.002; use another"
    with pytest.raises(UserError, match=sentence):
        prepare_folder(second)
    assert not (tmp_path / "second" / "run.toml").exists()
    with pytest.raises(UserError, match="whose checkpoints --overwrite would remove; use another"):
        prepare_folder(second, overwrite=True)
    assert held(store) == [(2, 0.002), (4, 0.002)]


def test_who_has_saved_nothing_yet_is_not_mixed_with_either(tmp_path: Path, store: str) -> None:
    first = made(tmp_path, "first", store)
    prepare_folder(first)
    second = made(tmp_path, "second", store, "learning_rate.peak=1e-2")
    with pytest.raises(UserError, match="is that of the run in"):
        prepare_folder(second)
    # The second took over, in the knowledge of the first.
    taken_over(second)
    with pytest.raises(UserError, match=r"was taken over by the run in .*/second of host .*: this run ends"):
        train_rank(0, first)
    train_rank(0, second)
    assert held(store) == [(2, 0.01), (4, 0.01)]


def test_a_store_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    first = made(tmp_path, "first", "")
    prepare_folder(first)
    rows = tmp_path / "first" / "metrics.jsonl"
    rows.write_text("{}\n")
    (tmp_path / "file").touch()
    (tmp_path / "fifo").mkdir()
    os.mkfifo(tmp_path / "fifo" / "owner-00000001-0123456789abcdef.json")
    for store in (str(tmp_path / "file"), f"file://{tmp_path}/file", "/proc/nothing", str(tmp_path / "fifo")):
        with pytest.raises(
            UserError, match=r"checkpoint.folder=.* cannot be (written|read)|\(it is no file\); remove it"
        ):
            prepare_folder(made(tmp_path, "first", store), overwrite=True)
        assert rows.exists(), "of the earlier run nothing is removed"
        new = made(tmp_path, "new/run", store)
        with pytest.raises(UserError, match=r"cannot be (written|read)|is no file"), claimed(tmp_path / "new" / "run"):
            prepare_folder(new)
        assert not (tmp_path / "new").exists()


TAKES_OVER = """
import time
from cuboid.spec.run import load_run
from cuboid.training.callbacks import Callback
from tests.checkpoint.test_owner import held, taken_over

class Other(Callback):
    def on_step(self, trainer, step, result):
        if step == 3:
            while not held({store!r}):  # step 2 is saved in the background
                time.sleep(0.02)
            taken_over(load_run({file!r}))
"""


def test_a_run_that_is_taken_over_ends_at_its_next_save(tmp_path: Path, store: str) -> None:
    second = made(tmp_path, "second", store)
    file = tmp_path / "second.toml"
    file.write_text(dump_run(second))
    (tmp_path / "watch.py").write_text(TAKES_OVER.format(file=str(file), store=store))
    first = made(tmp_path, "first", store, f"training.callbacks=python:{tmp_path}/watch.py:Other", "training.steps=8")
    prepare_folder(first)
    with pytest.raises(UserError, match=r"was taken over by the run in .*/second"):
        train_rank(0, first)
    assert held(store) == [(2, 0.002)], "nothing of the first beside what the second writes"


def test_a_run_resumes_on_another_layout_and_from_another_output_folder(tmp_path: Path, pool: Pool) -> None:
    store = f"file://{tmp_path}/kept"
    first = made(tmp_path, "first", store)
    prepare_folder(first)
    train_rank(0, first)
    second = made(tmp_path, "second", store, "training.steps=6", layout="dp=2")
    said = prepare_folder(second)
    assert said.startswith(f"resuming the run in {tmp_path}/first of host ") and "training.steps=6 (was 4)" in said
    pool.run("tests.training.cases:train_rank", (second,), ranks=2)
    assert [step for step, _ in held(store)] == [4, 6]
    rows = [json.loads(line) for line in (tmp_path / "second/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 6]


def test_its_own_run_may_change_its_learning_rate(tmp_path: Path, store: str) -> None:
    first = made(tmp_path, "first", store)
    prepare_folder(first)
    train_rank(0, first)
    changed = made(tmp_path, "first", store, "learning_rate.peak=1e-2", "training.steps=6")
    assert "learning_rate.peak=0.01 (was 0.002)" in prepare_folder(changed)
    train_rank(0, changed)
    assert held(store) == [(4, 0.002), (6, 0.01)]
    prepare_folder(changed, overwrite=True)
    assert held(store) == [] and read_owner(locate(store)) is not None


def test_a_person_may_take_over(tmp_path: Path, store: str) -> None:
    first = made(tmp_path, "first", store)
    prepare_folder(first)
    train_rank(0, first)
    second = made(tmp_path, "second", store, "learning_rate.peak=1e-2", "training.steps=6")
    assert "learning_rate.peak=0.01 (was 0.002)" in prepare_folder(second, take_over=True)
    train_rank(0, second)
    assert held(store) == [(4, 0.002), (6, 0.01)]
    third = made(tmp_path, "third", store)
    prepare_folder(third, overwrite=True, take_over=True)
    assert held(store) == []


def test_checkpoints_of_runs_that_did_not_say_whose_they_are(tmp_path: Path, store: str) -> None:
    first = made(tmp_path, "first", store)
    train_rank(0, first)  # nobody prepared its folder
    assert read_owner(locate(store)) is None
    with pytest.raises(
        UserError, match=r"is that of the run in .*/first, and learning_rate.peak=0.01 is not its 0.002"
    ):
        prepare_folder(made(tmp_path, "second", store, "learning_rate.peak=1e-2"))
    assert prepare_folder(made(tmp_path, "third", store, "training.steps=6")).startswith("resuming the run in")


def test_checkpoints_within_the_output_folder_need_no_word(tmp_path: Path) -> None:
    run = short_run("dp=1", str(tmp_path / "run"), "training.steps=2", "checkpoint.every=2")
    prepare_folder(run)
    train_rank(0, run)
    assert not newest_claims(locate(tmp_path / "run/checkpoints")).names and not (tmp_path / "run/identity").exists()


def test_a_word_that_is_none(tmp_path: Path) -> None:
    (tmp_path / FIRST).write_text('{"identity": 3}')
    with pytest.raises(UserError, match=r"owner.json does not say whose checkpoints these are .*; remove it"):
        read_owner(locate(tmp_path))


def test_two_at_once_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same settings, so that nothing but the lock tells them apart."""
    monkeypatch.chdir(tmp_path)
    fields = ["training.steps=1", "training.sequence=8", "training.device=cpu", "checkpoint.folder=kept"]
    with claimed(tmp_path / "kept"):
        assert main(["train", *(word for field in fields for word in ("--set", field))]) == 2
    assert capsys.readouterr().err == (
        "error: checkpoint.folder=kept is in use by another run; stop that one, or use another folder\n"
    )
    assert not list((tmp_path / "kept").iterdir())


def test_stores_have_no_locks_and_nothing_else_is_locked_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = ["training.steps=1", "training.sequence=8", "training.device=cpu", "checkpoint.every=1"]
    fields.append(f"checkpoint.folder=file://{tmp_path}/kept")
    with claimed(tmp_path), claimed(tmp_path / "kept"):
        assert main(["train", *(word for field in fields for word in ("--set", field))]) == 0
    assert [step for step, _ in held(f"file://{tmp_path}/kept")] == [1]


def test_who_was_slower_is_refused_and_leaves_nothing(tmp_path: Path, store: str) -> None:
    """Both looked at the same moment and found nobody."""
    first, second = (made(tmp_path, name, store) for name in ("first", "second"))
    place = locate(store)
    seen = newest_claims(place)
    claim = own(first, place, seen)
    assert claim is not None
    for after in (seen, Claims(0)):
        with pytest.raises(
            UserError, match=r"was claimed by the run in .*/first of host .* in the same moment; use an"
        ):
            own(second, place, after)
        assert newest_claims(place).names == (claim.name,) and len(place.names()) == 1
    follower = own(second, place)
    assert follower is not None and follower.number == claim.number + 1
    follower.withdraw()
    assert newest_claims(place).names == (claim.name,)


def test_claims_that_a_killed_run_left_beside_are_followed(tmp_path: Path, store: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("cuboid.checkpoint.owner.PATIENCE", 0.3)
    place = locate(store)
    first = own(made(tmp_path, "first", store), place)
    assert first is not None
    late = replace(first, identity="f" * 16, was_there=False)
    (place / late.name).write_durably((place / first.name).read())  # of the same moment, and killed before it looked
    second = own(made(tmp_path, "second", store), place)
    assert second is not None and second.number == 2
    second.keep()
    assert newest_claims(place).names == (second.name,) and len(place.names()) == 1
    beside = replace(second, identity="f" * 16, was_there=False)
    (place / beside.name).write_durably((place / second.name).read())
    with pytest.raises(UserError, match="in the same moment"):
        own(made(tmp_path, "third", store), place, Claims(1))


def test_a_folder_of_a_run_from_before_claims_had_numbers(tmp_path: Path, store: str) -> None:
    first = made(tmp_path, "first", store)
    prepare_folder(first)
    train_rank(0, first)
    place = locate(store)
    name = newest_claims(place).names[0]
    (place / FIRST).write_durably((place / name).read())
    (place / name).remove()
    train_rank(0, first)
    with pytest.raises(UserError, match=r"learning_rate.peak=0.01 is not its 0.002"):
        prepare_folder(made(tmp_path, "second", store, "learning_rate.peak=1e-2"))
    prepare_folder(first)
    assert newest_claims(place).number == 1 and FIRST not in place.names()


def test_a_run_ends_when_another_names_its_own_folder(tmp_path: Path) -> None:
    """One with checkpoints in its output folder has said nothing of them."""
    first = made(tmp_path, "first", "")
    prepare_folder(first)
    prepare_folder(made(tmp_path, "second", str(tmp_path / "first/checkpoints"), "learning_rate.peak=1e-2"))
    with pytest.raises(UserError, match=r"was taken over by the run in .*/second"):
        train_rank(0, first)


STARTS = """
import sys, time
from pathlib import Path
from cuboid.errors import UserError
from cuboid.spec.run import load_run
from cuboid.training.run_folder import prepare_folder
folder, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(rounds):
    run = load_run(folder / f"{name}-{number}.toml")
    (folder / f"ready-{name}-{number}").touch()
    while len(list(folder.glob(f"ready-*-{number}"))) < 3:
        pass
    try:
        prepare_folder(run)
        print("began", flush=True)
    except UserError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize("kind", ["", "file://"])
def test_of_several_processes_that_start_in_one_moment_one_begins(tmp_path: Path, kind: str) -> None:
    rounds, names = 12, ("a", "b", "c")
    for name in names:
        for number in range(rounds):
            run = made(tmp_path, f"{name}{number}", f"{kind}{tmp_path}/kept{number}", f"training.seed={ord(name)}")
            (tmp_path / f"{name}-{number}.toml").write_text(dump_run(run))
    started = [
        subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path), name, str(rounds)], stdout=PIPE, text=True)
        for name in names
    ]
    told = [process.communicate()[0].splitlines() for process in started]
    for number, said in enumerate(zip(*told, strict=True)):
        assert said.count("began") == 1, said
        assert all("in the same moment" in word or "is that of the run in" in word for word in said if word != "began")
        assert len(newest_claims(locate(tmp_path / f"kept{number}")).names) == 1
    assert len(told[0]) == rounds


def test_the_same_name_of_an_output_folder_elsewhere_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users who start from folders of their own, both with the name that runs have by default."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    first = short_run("dp=1", "runs/default", "training.steps=4", "checkpoint.every=2")
    prepare_folder(first)
    train_rank(0, first)
    place = tmp_path / "one/runs/default/checkpoints"
    before = held(str(place))
    monkeypatch.chdir(tmp_path / "two")
    common = ("training.steps=4", "checkpoint.every=2", f"checkpoint.folder={place}", "learning_rate.peak=1e-2")
    second = short_run("dp=1", "runs/default", *common)
    with pytest.raises(UserError, match=r"is that of the run in runs/default, and learning_rate.peak=0.01"):
        prepare_folder(second)
    with pytest.raises(UserError, match="whose checkpoints --overwrite would remove"):
        prepare_folder(second, overwrite=True)
    assert held(str(place)) == before and len(before) == 2
    monkeypatch.chdir(tmp_path / "one")
    prepare_folder(short_run("dp=1", "runs/default", *common))  # it is its own


def test_checkpoints_of_a_run_that_trains_now_are_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where that run has not named them: what it has claimed is its output folder."""
    first = made(tmp_path, "first", "")
    prepare_folder(first)
    with claimed(Path(first.output.folder)):
        (tmp_path / "second.toml").write_text(dump_run(made(tmp_path, "second", str(tmp_path / "first/checkpoints"))))
        assert main(["train", str(tmp_path / "second.toml")]) == 2
    assert "first is in use by another run" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()
