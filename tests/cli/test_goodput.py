"""`cuboid goodput`: a table, one JSON object, a picture; and what a run's own folder shows."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cuboid.cli.main import main


def test_the_sizes_that_are_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "goodput.svg"
    assert main(["goodput", "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert all(size in shown for size in ("1,024", "16,384", "100,000"))
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 6


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "--gpus", "16384", "--failures", "llama3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    disk, memory = said["cases"]
    assert disk["interval_seconds"] == pytest.approx(disk["young_daly_seconds"], rel=0.02)
    assert disk["expected"] == pytest.approx(disk["simulated"], abs=0.01)
    assert memory["expected"] > disk["expected"]
    assert memory["memory_interval_seconds"] < disk["interval_seconds"] < memory["interval_seconds"]


def test_a_run_is_asked_for_its_own_saves_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = tmp_path / "folder", tmp_path / "run.toml"
    folder.mkdir()
    run.write_text(f'model = "tiny-llama"\nlayout = "dp=8"\n[output]\nfolder = "{folder}"\n')
    save = {"stall_seconds": 0.5, "write_seconds": 20.0, "warning": "", "place": "disk"}
    copy = {"stall_seconds": 0.02, "write_seconds": 0.1, "warning": "", "place": "memory"}
    told = {"loss": 6.0, "gradient_norm": 1.0, "tokens": 64}
    rows = [
        {"step": 1, "seconds": 30.0, **told},
        {"step": 2, "seconds": 2.0, **told, "checkpoints": [copy, save, copy]},
        {"step": 3, "seconds": 2.0, **told},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    failure = {"time": "", "reason": "", "checkpoint": 1}
    lines = [{**failure, "restarted": restarted} for restarted in (True, True, False)]
    (folder / "failures.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "goodput.json").write_text(json.dumps({"restarts": 80.0, "set_up": 300.0}))
    assert main(["goodput", str(run), "--mtbf-hours", "1"]) == 0
    shown = capsys.readouterr().out
    assert "detect 30, restart 50, load 60" in shown  # 80 / 2 + 300 / 3 s in all
    assert "stall 0.5, write 20," in shown
    assert "checkpoint.every=30" in shown  # √(2 × 0.5 × 3600) s
    assert main(["goodput", str(run), "--mtbf-hours", "1", "--write", "5", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["costs"]["write"] == 5
    assert said["cases"][1]["memory_interval_seconds"] < 20  # about √(2 × 0.02 × 3600 / 0.9) s


def test_what_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "--failures", "mine"]) == 2
    assert capsys.readouterr().err == "error: failures=mine is not known; use llama3 or rsc, or --mtbf-hours\n"
