"""The flight recorder's variables, and records that tell nothing or are no records."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from cuboid.resilience.hang_dumps import Open, Recorders, offer_record, oldest_open, tell_open
from cuboid.telemetry.heartbeat import Reading
from tests.resilience.stuck_jobs import ENTRIES

NAMES = (
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_BUFFER_SIZE",
)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)


def test_records_go_to_the_runs_folder_and_pipes_to_the_supervisor(tmp_path: Path) -> None:
    offer_record(tmp_path / "run", tmp_path / "heartbeats", "2.13.0+cu130")
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == {
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "run/flight-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "heartbeats/flight-"),
    }


def test_older_torch_is_told_the_size_under_its_older_name(tmp_path: Path) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "7"
    offer_record(tmp_path, None, "2.11.0+cu128")
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in os.environ, "nobody would write to it"


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    chosen = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    os.environ.update(chosen)
    offer_record(tmp_path, tmp_path, "2.13.0")
    assert {name: os.environ[name] for name in chosen} == chosen
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ, "it would win over the other name"


def test_ranks_without_a_pipe_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "flight-1.pipe")  # which nobody reads
    assert Recorders([Reading(0), Reading(1)], tmp_path, tmp_path).collect(tmp_path) == {}


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil",)


def test_nothing_but_plain_values_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (pickle.dumps({"entries": [Evil()]}), b"", b"junk", pickle.dumps([1]), pickle.dumps({"entries": 3})):
        (tmp_path / "flight-0").write_bytes(content)
        assert oldest_open(tmp_path / "flight-0") is None
    assert not (tmp_path / "evil").exists()
    assert oldest_open(tmp_path / "missing") is None


def test_the_oldest_that_has_not_ended_is_told(tmp_path: Path) -> None:
    groups = {"5": {"ranks": "[2, 3, 4]", "desc": ""}}
    entries = [{**entry, "process_group": ("5", "")} for entry in ENTRIES]
    (tmp_path / "flight-0").write_bytes(pickle.dumps({"entries": entries, "pg_config": groups}))
    assert oldest_open(tmp_path / "flight-0") == Open("nccl:all_gather", 7, (2, 3, 4))
    (tmp_path / "flight-1").write_bytes(pickle.dumps({"entries": entries[2:]}))
    message = oldest_open(tmp_path / "flight-1")
    assert message == Open("nccl:send 0->1", 1, ())
    (tmp_path / "flight-2").write_bytes(pickle.dumps({"entries": entries[:1]}))
    assert oldest_open(tmp_path / "flight-2") is None
    told = tell_open({2: Open("nccl:all_gather", 7, (2, 3)), 3: Open("nccl:all_gather", 7, (2, 3)), 0: message})
    assert told == ("not ended on the device: rank 0 in nccl:send 0->1 1, ranks 2–3 in nccl:all_gather 7 of ranks 2–3")
    assert tell_open({}) == ""
