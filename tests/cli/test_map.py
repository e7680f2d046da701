"""`cuboid map`: the picture and its JSON."""

import json

import pytest

from cuboid.cli.main import main


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def shown(capsys: pytest.CaptureFixture[str], layout: str, cluster: str, *more: str) -> str:
    assert main(["map", "--layout", layout, "--cluster", cluster, *more]) == 0
    return capsys.readouterr().out


def lines_with(text: str, part: str) -> list[str]:
    return [" ".join(line.strip("│ ").split()) for line in text.splitlines() if part in line]


def test_the_cube_of_eight(capsys: pytest.CaptureFixture[str]) -> None:
    picture = shown(capsys, "dp=2,tp=2,pp=2", "cpux8")
    assert "dp=2,tp=2,pp=2 on cpux8: 8 ranks, 1 node of 8" in picture
    assert lines_with(picture, "replica") == [
        "stage 0 replica 0 [0 1]",
        "stage 0 replica 1 [2 3]",
        "stage 1 replica 0 [4 5]",
        "stage 1 replica 1 [6 7]",
    ]
    assert lines_with(picture, "gradients") == ["data 4 × 2 0 2 shared-memory 4 GB/s gradients"]


def test_stages_of_a_v_schedule_and_groups_that_span_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    picture = shown(capsys, "tp=16,pp=2,schedule=zbv", "h100x32")
    assert "stages 0+3  [ 0  1  2  3  4  5  6  7…" in picture
    assert "stages 1+2  …24 25 26 27 28 29 30 31]" in picture
    assert "tied embedding" not in picture


def test_large_clusters_are_summarised(capsys: pytest.CaptureFixture[str]) -> None:
    picture = shown(capsys, "dp=16,tp=8,pp=128", "h100x16384")
    assert len(picture.splitlines()) < 60
    assert picture.count("─ node ") == 2
    assert "and 2,046 more nodes" in picture
    assert lines_with(picture, "16256–16383") == ["127 127 2032–2047 16256–16383"]
    assert all(len(line) <= 100 for line in picture.splitlines())


def test_as_many_nodes_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "dp=16,tp=8", "h100x128", "--nodes", "5").count("─ node ") == 5
    assert shown(capsys, "dp=16,tp=8", "h100x128", "--nodes", "99").count("─ node ") == 16


def test_one_rank_is_drawn_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert "One rank: nothing travels." in shown(capsys, "dp=1", "h100x1")


def test_json_holds_every_rank_and_group(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "dp=2,tp=2,pp=4,schedule=interleaved", "h100x16", "--json"))
    assert found["layout"] == "dp=2,tp=2,pp=4,schedule=interleaved"
    assert found["ranks"][13] == {"rank": 13, "node": 1, "pp": 3, "dp": 0, "cp": 0, "tp": 1}
    assert found["stages_of_pipeline_rank"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    by_kind = {line["kind"]: line for line in found["traffic"]}
    assert by_kind["tp"]["slowest"]["name"] == "nvlink4"
    assert by_kind["tp"]["groups"][0] == [0, 1]
    assert by_kind["pp"]["tiers"] == {"nvlink4": 8, "infiniband-ndr": 8}


def test_a_model_checks_the_layout_and_knows_its_ties(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tied embedding" in shown(capsys, "tp=4,pp=2", "h100x8", "--model", "gpt2")
    assert "tied embedding" not in shown(capsys, "tp=4,pp=2", "h100x8", "--model", "llama3-8b")
    assert main(["map", "--layout", "tp=8", "--cluster", "h100x8", "--model", "gpt2"]) == 2
    assert capsys.readouterr().err == "error: tp=8 does not divide heads=12; use tp=6 or tp=12\n"


def test_the_layout_must_fill_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "--layout", "dp=4", "--cluster", "h100x8"]) == 2
    assert capsys.readouterr().err == "error: dp=4 needs world_size=4, not 8; use dp=8 or start 4 ranks\n"


def test_a_node_of_very_many_ranks_is_drawn_by_its_ends(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "dp=16384", "cpux16384")
    assert len(text.splitlines()) < 100
    assert (
        lines_with(text, "replica 0 ") and lines_with(text, "replica 16383 ") and not lines_with(text, "replica 8000 ")
    )
    assert len(lines_with(shown(capsys, "dp=64", "cpux64"), "replica")) == 64
