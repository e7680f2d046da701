"""Opens reports in a real browser: small and quick enough, beside all that tests/report/test_browser.py checks.

    python benchmarks/report_pages.py [--run FOLDER]

Needs Chromium; trains a small run on four processes first. Fails with the first thing that is not so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.report.browser import Tab, chromium
from tests.report.looks import check_hover, check_keys, check_open

MOST_SECONDS = 2.0
PLANS = {
    "gpt3-175b on 1,024": ("gpt3-175b", "a100-80gx1024", 1536, 2048),
    "llama3-405b on 16,384": ("llama3-405b", "h100x16384", 2048, 8192),
}


def cuboid(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cuboid.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)


def train(folder: Path) -> Path:
    """A plan for this machine, trained with times and collectives kept."""
    plan, run = folder / "demo.toml", folder / "demo"
    fixed = ["--fix", "dp=2,pp=2", "--precision", "float32", "-o", str(plan)]
    cuboid("plan", "tiny-llama", "cpux4", "--global-batch", "16", "--seq", "64", *fixed)
    fields = ["training.steps=30", "training.device=cpu", "output.keep_timing=true", f"output.folder={run}"]
    fields += ["checkpoint.every=10", "learning_rate.warmup_steps=5"]
    settings = [argument for field in fields for argument in ("--set", field)]
    cuboid("train", str(plan), "--count-communication", *settings)
    return run


def check(tab: Tab, name: str, page: Path, bounded: bool) -> None:
    """At the width of a screen and of a phone, light and dark."""
    size, quickest = page.stat().st_size, float("inf")
    for width, dark in ((1280, False), (1280, True), (390, False)):
        seconds = check_open(tab, page, width, dark)
        print(f"{name:24} {width:5} px {'dark ' if dark else 'light'} {size / 1e6:5.2f} MB {seconds:5.2f} s")
        quickest = min(quickest, seconds)
    # The machine may be busy, and the first page also waits for the browser to wake up.
    assert not bounded or quickest < MOST_SECONDS, (name, quickest)
    check_open(tab, page)
    check_hover(tab)
    check_keys(tab)
    assert not tab.complaints, (name, tab.complaints)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="the folder of a run there is already, with times kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, chromium() as tab:
        folder = Path(name)
        run = given.run or train(folder)
        cuboid("report", str(run), "-o", str(folder / "run.html"))
        check(tab, "demo run", folder / "run.html", bounded=True)
        for title, (model, cluster, batch, sequence) in PLANS.items():
            plan, page = folder / f"{model}.toml", folder / f"{model}.html"
            cuboid("plan", model, cluster, "--global-batch", str(batch), "--seq", str(sequence), "-o", str(plan))
            cuboid("report", str(plan), "-o", str(page))
            check(tab, title, page, bounded="1,024" in title)
    print("all as it should be")


if __name__ == "__main__":
    main()
