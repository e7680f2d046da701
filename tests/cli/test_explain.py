"""`cuboid explain`: tables and formulae for plans and for layouts of one's own."""

import json
from pathlib import Path

import pytest

from cuboid.cli.main import main

ASKED = ["--global-batch", "2048", "--seq", "2048"]


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_1t_on_4096_a100(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--layout", "dp=8,tp=8,pp=64,zero=1"]
    assert main(["explain", "gpt-1t", "a100-80gx4096", *layout, "--global-batch", "4096", "--seq", "2048"]) == 0
    shown = words(capsys)
    assert "16 bytes × 1008 billion parameters = 16.13 TB of states" in shown
    assert "tp=8 × pp=64 = 512 accelerators hold one replica" in shown
    assert "so dp=8" in shown
    assert "the planner's own choice" in shown or "no other layout searched is faster" in shown


def test_512_gpus_at_8_8_8(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gpt3-175b", "a100-80gx512", "--layout", "dp=8,tp=8,pp=8", *ASKED, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["framework"]["replica"] == 64
    assert answer["layers_per_stage"] == [12] * 8
    assert len(answer["memory"]) == 8
    assert {entry["dimension"]: entry["tier"] for entry in answer["traffic"]} == {
        "tp": "nvlink3",
        "pp": "infiniband-hdr",
        "embedding": "infiniband-hdr",
        "data": "infiniband-hdr",
        "world": "infiniband-hdr",
    }
    states = [sum(row[name] for name in ("weights", "gradients", "optimizer")) for row in answer["memory"]]
    # 16 bytes a parameter over 64 ranks: gradients are summed in float32, and of a master weight two bytes are the
    # weight's own. More where the embedding and the head are.
    assert min(states) == pytest.approx(16 * 174.6e9 / 64, rel=0.05)


def test_the_memory_table_names_ranks_and_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "gpt3-175b", "a100-80gx512", "--layout", "dp=8,tp=8,pp=8", *ASKED]) == 0
    shown = capsys.readouterr().out
    header = next(line for line in shown.splitlines() if line.split()[:2] == ["rank", "layers"])
    assert header.split()[2:6] == ["params", "grads", "optim", "activ"]
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] and line.split()[0] in ("0", "7")]
    assert [row[0] for row in rows] == ["0", "7"]
    for row in rows:
        *parts, total, share = row[2:]
        assert sum(map(float, parts)) == pytest.approx(float(total), abs=0.05)
        assert share.endswith("%")


def test_a_layout_other_than_the_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "plan.toml")
    question = ["llama3-8b", "h100x16", "--global-batch", "32", "--seq", "4096"]
    assert main(["plan", *question, "-o", file]) == 0
    assert main(["explain", file, "--layout", "dp=2,tp=8,pp=1"]) == 0
    assert "llama3-8b on h100x16: dp=2,tp=8,pp=1" in words(capsys)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("dp=8,tp=8", "dp=8 × tp=8 needs world_size=64, not 512"),
        ("dp=512", "global_batch=100 does not divide by dp=512"),
        ("dp=8,tp=8,pp=8,zero=4", "zero=4 is out of range"),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(
    layout: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--layout", layout, "--global-batch", "100", "--seq", "2048"]
    assert main(["explain", "gpt3-175b", "a100-80gx512", *asked]) == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
