"""The folder of a run: claimed once, and never by two runs."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.spec.islands import IslandsSpec
from cuboid.spec.run import Run, build_run, load_run
from cuboid.telemetry.rows import metric_rows
from cuboid.training.run_folder import Rows, _tell_settings, as_begun, last_step, layer_names, prepare_folder
from tests.training.cases import short_run, train_rank


def run_in(folder: Path, steps: int = 5) -> Run:
    return build_run({"model": "tiny-llama"}, [f"output.folder={folder}", f"training.steps={steps}"])


def test_the_folder_is_made_and_holds_the_run(tmp_path: Path) -> None:
    run = run_in(tmp_path / "a" / "b")
    assert prepare_folder(run) == ""
    folder = tmp_path / "a" / "b"
    assert load_run(folder / "run.toml") == run
    assert [path.name for path in folder.iterdir()] == ["run.toml"], "nothing aside is left"


def test_a_folder_without_a_run_may_hold_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    prepare_folder(run_in(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_another_run_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    first = run_in(tmp_path)
    prepare_folder(first)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    second = build_run({"model": "tiny-gpt2"}, [f"output.folder={tmp_path}"])
    with pytest.raises(UserError, match=r"model is not that of the run in .*, another output.folder, or --overwrite"):
        prepare_folder(second)
    assert load_run(tmp_path / "run.toml") == first
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_log_that_nobody_may_append_to_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    prepare_folder(run_in(tmp_path))
    log = tmp_path / "communication-00000.jsonl"
    if os.geteuid():
        log.touch(mode=0o444)
    else:
        log.symlink_to("/sys/class/net/lo/address")  # which root may not write either
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"communication-00000.jsonl cannot be written: .*; remove it"):
        prepare_folder(run_in(tmp_path))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    log.unlink()
    log.write_text("")
    prepare_folder(run_in(tmp_path))


def test_overwriting_removes_what_the_old_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    prepare_folder(run_in(tmp_path))
    for name in ("metrics.jsonl", "timing-00000.jsonl", "timing-00013.jsonl", "failure-00003.txt", "notes.txt"):
        (tmp_path / name).write_text("old\n")
    second = run_in(tmp_path, steps=6)
    prepare_folder(second, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "run.toml"]
    assert load_run(tmp_path / "run.toml") == second


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine\n")
    with pytest.raises(UserError, match="taken is a file; use the name of a folder"):
        prepare_folder(run_in(tmp_path / "taken"))
    with pytest.raises(UserError, match="cannot be written: Not a directory; use another folder"):
        prepare_folder(run_in(tmp_path / "taken" / "run"))


@pytest.mark.parametrize("name", ["x" * 300, "sys"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, name: str) -> None:
    # Too long a name; and a place where not even root can make a folder.
    folder = Path("/proc/none") if name == "sys" else tmp_path / name
    with pytest.raises(UserError, match=r"cannot be written: .*; use another folder"):
        prepare_folder(run_in(folder))


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):  # root may write everywhere
            prepare_folder(run_in(tmp_path / "run"))
            assert (tmp_path / "run").is_dir()
        else:
            with pytest.raises(UserError, match="cannot be written: Permission denied"):
                prepare_folder(run_in(tmp_path / "run"))
    finally:
        tmp_path.chmod(0o700)


def test_going_on_forgets_what_ended_the_run_before(tmp_path: Path) -> None:
    prepare_folder(run_in(tmp_path))
    for name in ("metrics.jsonl", "failure-00003.txt"):
        (tmp_path / name).write_text("old\n")
    said = prepare_folder(run_in(tmp_path, steps=9))
    assert said == f"{tmp_path} has no whole checkpoint: starting anew from step 0"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "run.toml"]
    assert load_run(tmp_path / "run.toml").training.steps == 9


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_rows_of_steps_that_will_be_done_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Rows(path)
    for step in (1, 2, 3):
        first.append({"step": step, "loss": 1.0})
    first.close()
    second = Rows(path, done=2)
    second.append({"step": 3, "loss": 0.5})
    second.close()
    assert [(row["step"], row["loss"]) for row in metric_rows(path)] == [(1, 1.0), (2, 1.0), (3, 0.5)]
    Rows(path).close()
    assert lines(path) == [], "a run that begins anew keeps none"
    assert [each.name for each in tmp_path.iterdir()] == ["rows.jsonl"], "and nothing is left aside"


def test_a_number_that_is_not_finite_is_null_wherever_it_stands_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = Rows(path)
    routers = {"balance_loss": math.nan, "largest_load": [1.5, math.inf], "dead": 0}
    islands = {"island": 0, "round": 1, "outer_gradient_norm": math.nan, "drift": -math.inf, "waited": 0.0}
    told = {"loss": math.nan, "gradient_norm": math.inf, "seconds": 1.0, "tokens": 4}
    rows.append({"step": 1, **told, "routers": routers, "islands": islands})
    rows.append({"step": 2, **told})
    rows.close()
    first, second = metric_rows(path)
    assert (first["loss"], first["gradient_norm"], second["loss"]) == (None, None, None)
    assert first["routers"] == {"balance_loss": None, "largest_load": [1.5, None], "dead": 0}
    assert first["islands"] == islands | {"outer_gradient_norm": None, "drift": None}


TORN = [b'{"step": 3, "lo', b"\x00" * 20, b'{"step": 3}', b"[3]\n", b'{"loss": 1.0}\n', b'{"step": "3"}\n']


@pytest.mark.parametrize("torn", TORN)
def test_what_a_killed_writer_left_half_is_no_row(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert [row["step"] for row in metric_rows(path)] == [1, 2]
    assert last_step(path) == 2
    rows = Rows(path, done=5)
    rows.append({"step": 3})
    rows.close()
    assert lines(path) == ['{"step": 1}', '{"step": 2}', '{"step": 3}']


@pytest.mark.parametrize("torn", TORN[3:])
def test_a_row_that_is_none_before_others_is_damage(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn + b'{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is no row; remove that line"):
        metric_rows(path)


def test_there_may_be_no_rows_at_all(tmp_path: Path) -> None:
    assert metric_rows(tmp_path / "nothing.jsonl") == [] and last_step(tmp_path / "nothing.jsonl") == 0


def test_more_is_added_to_the_last_row_and_writing_continues_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    rows.add_to_last("warnings", [{"text": "a"}])
    assert lines(path) == [], "there is no last one yet"
    rows.append({"step": 1})
    rows.append({"step": 2, "warnings": [{"text": "b"}]})
    rows.add_to_last("warnings", [{"text": "c"}])
    rows.append({"step": 3})
    rows.close()
    assert lines(path) == ['{"step": 1}', '{"step": 2, "warnings": [{"text": "b"}, {"text": "c"}]}', '{"step": 3}']


def test_names_of_layers_in_a_row() -> None:
    assert layer_names("activation_rms", 3) == ["0", "1", "2"]
    assert layer_names("gradient_norm", 4) == ["embedding", "0", "1", "head"]


def test_a_finished_run_without_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    prepare_folder(run_in(tmp_path, steps=2))
    told = '"gradient_norm": 1.0, "seconds": 0.1, "tokens": 64}\n'
    rows = f'{{"step": 1, "loss": 5.0, {told}{{"step": 2, "loss": 4.0, {told}'
    (tmp_path / "metrics.jsonl").write_text(rows[: rows.index("\n") + 1])
    assert "starting anew" in prepare_folder(run_in(tmp_path, steps=2)), "one step is missing: it may start again"
    (tmp_path / "metrics.jsonl").write_text(rows)
    for steps in (2, 9):
        with pytest.raises(UserError, match=r"holds a run that finished its 2 steps, and no checkpoint .*--overwrite"):
            prepare_folder(run_in(tmp_path, steps=steps))
        assert (tmp_path / "metrics.jsonl").read_text() == rows
        assert load_run(tmp_path / "run.toml").training.steps == 2
    prepare_folder(run_in(tmp_path), overwrite=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_file_of_rows_that_is_removed_is_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    rows.append({"step": 1})
    path.unlink()
    rows.append({"step": 2})
    rows.append({"step": 3})
    rows.close()
    assert [row["step"] for row in metric_rows(path)] == [3]
    assert capsys.readouterr().err.count("it was removed, with its rows; the training continues") == 1


@pytest.mark.parametrize("made_again", [False, True])
def test_without_its_folder_a_run_ends(tmp_path: Path, made_again: bool) -> None:
    """A save that is written meanwhile may make the folder again; the run file does not come back."""
    folder = tmp_path / "run"
    prepare_folder(run_in(folder))
    rows = Rows(folder / "metrics.jsonl")
    rows.append({"step": 1})
    shutil.rmtree(folder)
    if made_again:
        (folder / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"run was removed, or unmounted, while the run trained, which ends after step 2"
    ):
        rows.append({"step": 2})


def test_a_run_that_began_with_noise_on_logits_keeps_it(tmp_path: Path) -> None:
    """Run files of before `noise_on` do not say where noise is added; tables that people write mean the default."""
    run = build_run({"model": "tiny-deepseek"}, [f"output.folder={tmp_path}"])
    assert as_begun(run) == (run, ""), "nothing was begun"
    prepare_folder(run)
    assert as_begun(run) == (run, "")
    path = tmp_path / "run.toml"
    before = path.read_text()
    path.write_text(before.replace('noise_on = "scores"\n', ""))
    assert path.read_text() != before
    begun, said = as_begun(run)
    assert begun.model.mixture is not None
    assert begun.model.mixture.noise_on == "logits"
    assert said == "the run continues with model.mixture.noise_on=logits, as it began"
    assert load_run(path) == begun
    assert prepare_folder(begun) == f"{tmp_path} has no whole checkpoint: starting anew from step 0"


def test_rows_of_a_run_that_is_not_told_of_are_not_written_over(tmp_path: Path) -> None:
    prepare_folder(run_in(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "run.toml").unlink()
    with pytest.raises(UserError, match=r"has metrics\.jsonl and no run\.toml"):
        prepare_folder(run_in(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_finished_run_whose_checkpoints_are_all_damaged_is_not_trained_anew(tmp_path: Path) -> None:
    run = short_run("dp=1", str(tmp_path / "run"), "training.steps=4", "checkpoint.every=2")
    prepare_folder(run)
    train_rank(0, run)
    for path in tmp_path.glob("run/checkpoints/*/data-*.bin"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    rows = (tmp_path / "run/metrics.jsonl").read_bytes()
    for steps in (4, 6):
        again = replace(run, training=replace(run.training, steps=steps))
        with pytest.raises(UserError, match="holds a run that finished its 4 steps, and no checkpoint"):
            prepare_folder(again)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == rows


def test_what_islands_agree_on_may_not_change_and_what_else_is_computed_is_told(tmp_path: Path) -> None:
    islands = ["islands.count=2", "islands.every=4", "islands.fragments=2"]
    prepare_folder(build_run({"model": "tiny-llama"}, [f"output.folder={tmp_path / 'a'}", *islands]))
    for setting in ("fragments=3", "every=8", "bits=8", "delay=1", "momentum=0.9"):
        name = setting.partition("=")[0]
        with pytest.raises(UserError, match=f"islands.{name}=.* is not .* of the run in"):
            prepare_folder(
                build_run({"model": "tiny-llama"}, [f"output.folder={tmp_path / 'a'}", *islands, f"islands.{setting}"])
            )
    for setting in ("count=3", "quorum=2", "rate=0.9"):
        prepare_folder(
            build_run({"model": "tiny-llama"}, [f"output.folder={tmp_path / 'a'}", *islands, f"islands.{setting}"])
        )
    run = short_run("dp=1", str(tmp_path / "b"), "training.steps=4", "checkpoint.every=2")
    prepare_folder(run)
    train_rank(0, run)
    assert _tell_settings(*(replace(run, islands=IslandsSpec(count=2, rate=rate)) for rate in (0.7, 1.0))) == (
        "islands.rate=1.0 (was 0.7) from the next step on"
    )
    later = replace(run, training=replace(run.training, steps=6, dropout=0.5, gradient_clip=0.25))
    told = prepare_folder(later)
    assert "training.gradient_clip=0.25 (was 1.0), training.dropout=0.5 (was 0.0) from the next step on" in told
