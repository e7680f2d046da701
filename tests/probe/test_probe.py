"""A probe of this machine, and what the planner makes of its profile."""

import json
import socket
import tomllib
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.errors import UserError
from cuboid.launch.rendezvous import serve_store
from cuboid.planning.question import Question
from cuboid.probe.hosts import MARK, Meeting, _meet, interface_to, is_here
from cuboid.probe.profile import catalog_name, dump_profile, make_cluster
from cuboid.probe.samples import Sample
from cuboid.spec.cluster import load_cluster
from cuboid.spec.model import load_model
from tests.launch.ports import free_port


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probe") / "here.toml"
    assert main(["probe", "-o", str(path), "--ranks", "2", "--seconds", "2", "--device", "cpu"]) == 0
    return path


def test_the_profile_holds_what_was_measured_with_its_spread(profile: Path) -> None:
    table = tomllib.loads(profile.read_text())
    kinds = {sample["kind"] for sample in table["probe"]["samples"]}
    assert {"matmul", "attention_forward", "attention_backward", "memory", "gradients", "update"} <= kinds
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift"} <= kinds
    for sample in table["probe"]["samples"]:
        assert 0 < sample["low"] <= sample["seconds"] <= sample["high"]
    assert {"bf16", "float32", "float64"} <= set(table["peak_tflops"])
    assert 0 < table["measured"]["chip"]["together"] <= 1


def test_it_is_a_cluster_for_every_verb(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    sizes = ["--global-batch", "16", "--seq", "256"]
    asked = ["plan", "tiny-llama", str(profile), *sizes, "--precision", "float32"]
    assert main([*asked, "-o", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert found[0]["cluster"] == "here"
    assert found[0]["step_seconds"] > 0
    assert main(["explain", str(plan)]) == 0
    assert main(["simulate", str(plan)]) == 0
    assert main(["map", "--layout", "dp=2", "--cluster", str(profile)]) == 0


def test_the_planner_uses_it_in_place_of_the_catalog(profile: Path) -> None:
    question = Question(
        model=load_model("tiny-llama"),
        cluster=load_cluster(str(profile)),
        global_batch=16,
        sequence=256,
        precision="float32",
    )
    written = tomllib.loads(profile.read_text())["measured"]
    assert question.machine.chip.kernel_floor == written["chip"]["kernel_floor"]
    assert question.machine.fabric.inner_latency == written["fabric"]["inner_latency"]
    assert question.profile.hidden_traffic == written["engine"]["hidden_traffic"]


def test_one_rank_claims_nothing_about_links(profile: Path, tmp_path: Path) -> None:
    rows = tomllib.loads(profile.read_text())["probe"]["samples"]
    samples = [
        Sample(row["kind"], tuple(row["size"]), (row["seconds"],), row.get("precision", ""), way=row["way"])
        for row in rows
        if row["ranks"] == 1
    ]
    found = make_cluster(samples, device="cpu", memory=2**33, host_memory=2**33, local=1, nodes=1)
    alone = tmp_path / "alone.toml"
    alone.write_text(dump_profile(found, samples, {}))
    written = tomllib.loads(alone.read_text())
    assert "tiers" not in written and written["measured"].keys() == {"chip", "engine"}
    assert load_cluster(str(alone)).tiers == load_cluster("cpux1").tiers
    assert main(["plan", "tiny-llama", str(alone), "--global-batch", "4", "--seq", "64"]) == 0


def test_a_broken_profile_is_refused_by_name(profile: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text(profile.read_text().replace("kernel_floor", "kernel_flor"))
    question = Question(
        model=load_model("tiny-llama"), cluster=load_cluster(str(broken)), global_batch=16, sequence=256
    )
    with pytest.raises(UserError, match=r"cluster\.measured\.chip\.kernel_floor"):
        _ = question.machine


def test_wrong_questions_are_refused_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    for words, mended in (
        (["--nodes", "2"], "--rendezvous HOST:PORT"),
        (["--rendezvous", "10.0.0.1:29400"], "--nodes 2"),
        (["--nodes", "2", "--rendezvous", "nowhere"], "--rendezvous node0:29400"),
        (["--nodes", "2", "--rendezvous", "a:" + "9" * 5000], "has no port from 1 to 65535"),
        (["-o", "profile.json"], "cluster.toml"),
        (["-o", str(folder)], "Is a directory"),
        (["-o", str(tmp_path / "nowhere" / "here.toml")], "in a folder that exists"),
        (["--device", "tpu"], "auto, cpu or cuda"),
        (["--interface", "lo"], "--nodes 2"),
        (["--nodes", "2", "--rendezvous", "127.0.0.1:29400", "--interface", "none"], "lo"),
        (["--seconds", "inf"], "86400"),
    ):
        assert main(["probe", *words]) == 2
        told = capsys.readouterr().err
        assert mended in told and told.count("\n") == 1
    assert list(tmp_path.iterdir()) == [folder]


def test_a_host_that_leads_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuboid.probe.hosts.PATIENCE", 0.1)
    with pytest.raises(UserError, match=r"nodes=2, and 1 met at .* within 0.1 s; start cuboid probe on the others"):
        _meet(Meeting(2, "127.0.0.1", free_port(), "lo"), {})


def test_hosts_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    store = serve_store(socket.create_server(("127.0.0.1", port)))
    store.set(f"{MARK}/seconds", "60.0")
    monkeypatch.setattr("cuboid.probe.hosts.is_here", lambda host: False)
    meeting = Meeting(2, "127.0.0.1", port, "lo")
    with pytest.raises(UserError, match=r"seconds=10\.0 is not what the leading host has; use --seconds 60.0"):
        _meet(meeting, {"seconds": 10.0})
    _, _, number = _meet(meeting, {"seconds": 60.0})
    assert number == 1
    with pytest.raises(UserError, match="use --nodes 3"):
        _meet(meeting, {"seconds": 60.0})


def test_hosts_find_each_other() -> None:
    assert is_here("127.0.0.1") and not is_here("192.0.2.7")
    assert interface_to("127.0.0.1", 29400) == "lo"


def test_devices_are_found_in_the_catalog() -> None:
    assert catalog_name("cpu") == "cpu"
    assert catalog_name("NVIDIA H200") == "h200"
    assert catalog_name("NVIDIA A100-SXM4-80GB").startswith("a100")
