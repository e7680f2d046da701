"""Reports in a real, headless Chromium: of a run, of 175 billion parameters on 1,024 ranks, and of 16,384 ranks.

    python -m pytest tests/report/test_browser.py --pictures docs/pictures     (takes the pictures of the pages anew)

Without a Chromium these tests are skipped, and the head of the session says so; `--browser` insists on one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuboid.cli.main import main
from cuboid.launch.pool import Pool
from tests.report.browser import Tab, chromium
from tests.report.cases import make_run, row, write_rows
from tests.report.looks import check_hover, check_keys, check_open, check_pinch, panel, take_pictures

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as found:
        yield found


def made(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def run_page(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for four processes, trained with times and collectives kept."""
    folder = tmp_path_factory.mktemp("report")
    plan, run, page = folder / "demo.toml", folder / "demo", folder / "run.html"
    sizes = ("--global-batch", 16, "--seq", 64, "--precision", "float32")
    made("plan", "tiny-llama", "cpux4", *sizes, "--fix", "dp=2,pp=2,schedule=1f1b", "-o", plan)
    fields = ("training.steps=16", "training.device=cpu", "output.keep_timing=true", f"output.folder={run}")
    fields += (
        "data.source=python-stdlib",
        "checkpoint.every=8",
        "learning_rate.warmup_steps=5",
        "learning_rate.peak=0.003",
    )
    made("train", plan, "--count-communication", *(word for field in fields for word in ("--set", field)))
    made("report", run, "-o", page)
    return page


def plan_page(folder: Path, model: str, cluster: str, batch: int, sequence: int) -> Path:
    plan, page = folder / "plan.toml", folder / "plan.html"
    made("plan", model, cluster, "--global-batch", batch, "--seq", sequence, "-o", plan)
    made("report", plan, "-o", page)
    return page


def test_a_run(tab: Tab, run_page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for width, dark in ((390, False), (1280, True), (1280, False)):
        check_open(tab, run_page, width, dark)
    check_hover(tab)
    check_keys(tab)
    check_pinch(tab)
    folder = Path(request.config.getoption("--pictures") or tmp_path)
    take_pictures(tab, run_page, folder, "run-summary", "run-timeline", "run-communication", "run-curves")
    assert not tab.complaints


def test_a_run_of_a_mixture(tab: Tab, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Experts that even out, one that died; of as many experts and layers as a large model has, and their norms."""
    make_run(tmp_path / "run", "dp=4,ep=2", 400, "model=qwen3-30b-a3b")
    norms = {"activation_rms": [1.0 + layer for layer in range(48)]}
    write_rows(tmp_path / "run" / "metrics.jsonl", [row(step, layers=norms) for step in (1, 2, 3)])
    waves = [[math.sin(layer + 7 * expert) for expert in range(127)] for layer in range(48)]
    windows = [
        {
            "step": 10 * number,
            "first": 10 * number - 9,
            "loads": [[max(5, round(100 + 400 * height / number)) for height in wave] + [0] for wave in waves],
        }
        for number in range(1, 41)
    ]
    write_rows(tmp_path / "run" / "experts.jsonl", windows)
    page = tmp_path / "run.html"
    made("report", tmp_path / "run", "--cluster", "h100x4", "-o", page)
    for width in (390, 1280):
        check_open(tab, page, width)
    tab.point("#experts canvas", 0.5, 0.2)
    assert "× the mean in steps 391 to 400" in str(tab.value("document.getElementById('tip').textContent"))
    tab.point("#layers canvas", 0.9, 0.5)
    assert re.match(r"Step 3, layer 2\d: activations behind each block, RMS 2\d$", panel(tab, "layers"))
    take_pictures(tab, page, Path(request.config.getoption("--pictures") or tmp_path), "run-experts")
    assert not tab.complaints


def test_a_plan_of_1024_ranks(tab: Tab, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = plan_page(tmp_path, "gpt3-175b", "a100-80gx1024", 1536, 2048)
    check_open(tab, page, 390)
    check_open(tab, page)
    check_hover(tab)
    check_keys(tab)
    folder = Path(request.config.getoption("--pictures") or tmp_path)
    take_pictures(tab, page, folder, "plan-memory", "plan-ranks", "plan-considered", "plan-explorer")
    assert not tab.complaints


def test_a_plan_of_16384_ranks_opens(tab: Tab, tmp_path: Path) -> None:
    page = plan_page(tmp_path, "llama3-405b", "h100x16384", 2048, 8192)
    check_open(tab, page)
    check_hover(tab)
    assert not tab.complaints
