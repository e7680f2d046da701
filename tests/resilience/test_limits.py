"""How long a job may stand still, and what counts as standing still."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.resilience.standstill import Silence, limit_of, limit_of_all
from cuboid.spec.run import ResilienceSpec
from cuboid.telemetry.heartbeat import Heartbeat, Learned, Phase, Place, Reading, Waiting, read_heartbeat

SPEC = ResilienceSpec(hang_factor=10, hang_floor_seconds=1, setup_seconds=600)
durations = st.lists(st.floats(0.001, 1000), min_size=4, max_size=80)


def learned_from(seconds: list[float], phase: Phase = "step") -> Reading:
    heartbeat = Heartbeat()
    for one in seconds:
        heartbeat.learn(phase, int(one * 1e9))
    heartbeat.enter(phase, len(seconds) + 1)
    return read_heartbeat(heartbeat.words)


@given(durations, st.sampled_from(["step", "evaluation", "save"]))
def test_no_phase_like_those_seen_reaches_the_limit(seconds: list[float], phase: Phase) -> None:
    limit = limit_of(learned_from(seconds, phase), SPEC)
    assert limit.seconds >= max(1, 2 * max(seconds) - 1e-6)
    assert limit.seconds <= max(1, 10 * max(seconds))


@given(durations, st.floats(1, 1e4))
def test_one_freak_among_many_only_doubles_itself(seconds: list[float], freak: float) -> None:
    quick = [min(one, 0.05) for one in seconds] * 3
    limit = limit_of(learned_from([*quick, freak]), SPEC)
    assert limit.seconds == pytest.approx(2 * freak)
    assert limit.origin == f"learned from {len(quick) + 1} steps"


@pytest.mark.parametrize("phase", ["set-up", "step", "evaluation", "save", "finish"])
def test_what_was_never_seen_may_take_as_long_as_setting_up(phase: Phase) -> None:
    reading = Reading(0, phase=phase)
    assert limit_of(reading, SPEC).seconds == 600
    patient = ResilienceSpec(setup_seconds=0)
    assert limit_of(reading, patient).seconds == 0, "no limit"


def test_the_most_patient_rank_counts() -> None:
    quick, slow = Reading(0, phase="step", learned={"step": Learned(9, 0.5, 0.6)}), Reading(1, phase="set-up")
    assert limit_of_all([quick], SPEC).seconds == 5
    assert limit_of_all([quick, slow], SPEC).seconds == 600
    assert limit_of_all([quick, slow], ResilienceSpec(setup_seconds=0)).seconds == 0


def test_a_job_that_finishes_ends_with_a_save() -> None:
    reading = Reading(0, phase="finish", learned={"save": Learned(3, 1.0, 4.0)})
    assert limit_of(reading, SPEC).seconds == 10


def test_the_first_step_teaches_nothing() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter("step", 1)
    time.sleep(0.02)
    heartbeat.enter("step", 2)
    assert read_heartbeat(heartbeat.words).learned["step"] == Learned()
    heartbeat.enter("save")
    read = read_heartbeat(heartbeat.words)
    assert read.learned["step"].seen == 1
    assert read.spent["step"] > 0.02, "it counts as time spent all the same"


def test_any_note_of_any_rank_ends_a_silence() -> None:
    silence = Silence(tick=1.0)
    assert silence.look(10.0, (1, 1)) == 0
    assert silence.look(11.0, (1, 1)) == 1
    assert silence.look(12.0, (1, 1)) == 2
    assert silence.look(13.0, (1, 2)) == 0
    assert silence.look(14.0, (1, 2)) == 1


def test_time_in_which_the_watcher_did_not_run_does_not_count() -> None:
    silence = Silence(tick=1.0)
    silence.look(10.0, (1,))
    assert silence.look(500.0, (1,)) == 2, "a machine that slept, or was too busy for everybody"


def test_ranks_that_have_no_core_get_more_time_but_not_twice_as_much() -> None:
    silence = Silence(tick=1.0)
    silence.look(0.0, (1,))
    assert silence.look(1.0, (1,), starved=0.3) == pytest.approx(0.7)
    assert silence.look(2.0, (1,), starved=0.9) == pytest.approx(1.3)


def test_a_heartbeat_is_read_as_it_was_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat()
    heartbeat.open(tmp_path, 3)
    data = heartbeat.track("data", (1, 3, 5))
    heartbeat.everybody("world", 8)
    heartbeat.enter("step", 12)
    heartbeat.do("backward", 2, 1)
    with data.collective("all-reduce"):
        read = read_heartbeat(heartbeat.words)
    place = Place("data", (1, 3, 5))
    assert (read.rank, read.phase, read.step, read.activity, read.stage, read.micro_batch) == (
        3, "step", 12, "backward", 2, 1,
    )  # fmt: skip
    assert read.waiting == Waiting("all-reduce", place, 1)
    assert read.counts == {place: 1, Place("world", tuple(range(8))): 0}
    after = read_heartbeat(heartbeat.words)
    assert after.waiting is None and after.waited >= 0 and after.changes == read.changes + 1
    assert (tmp_path / "rank-00003").read_bytes()[:8] != bytes(8)


def test_more_groups_than_there_is_room_for_are_not_told_apart() -> None:
    heartbeat = Heartbeat()
    tracks = [heartbeat.track("tp", (rank, rank + 1000)) for rank in range(300)]
    for track in tracks:
        with track.collective("all-gather"):
            pass
    read = read_heartbeat(heartbeat.words)
    assert len(read.counts) == 127
    assert set(read.counts.values()) == {1}
