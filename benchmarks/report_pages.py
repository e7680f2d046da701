"""Opens reports in a real browser: no errors, no requests, hover and keys work, small and quick enough.

    python benchmarks/report_pages.py [--pictures FOLDER] [--run FOLDER]

Needs Chromium; trains a small run on four processes first. Fails with the first thing that is not so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from browser import Tab, chromium

MOST_BYTES, MOST_SECONDS = 3_000_000, 2.0
PLANS = {
    "gpt3-175b on 1,024": ("gpt3-175b", "a100-80gx1024", 1536, 2048),
    "llama3-405b on 16,384": ("llama3-405b", "h100x16384", 2048, 8192),
}


def cuboid(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cuboid.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)


def train(folder: Path) -> Path:
    """A plan for this machine, trained with times and exchanges kept."""
    plan, run = folder / "demo.toml", folder / "demo"
    fixed = ["--fix", "dp=2,pp=2", "--precision", "float32", "-o", str(plan)]
    cuboid("plan", "tiny-llama", "cpux4", "--global-batch", "16", "--seq", "64", *fixed)
    fields = ["training.steps=30", "training.device=cpu", "output.keep_timing=true", f"output.folder={run}"]
    fields += ["checkpoint.every=10", "learning_rate.warmup_steps=5"]
    settings = [argument for field in fields for argument in ("--set", field)]
    cuboid("train", str(plan), "--count-communication", *settings)
    return run


def check(tab: Tab, name: str, page: Path, bounded: bool) -> None:
    """Everything a page must do, at the width of a screen and of a phone, light and dark."""
    size, quickest = page.stat().st_size, float("inf")
    for width, dark in ((1280, False), (1280, True), (390, False)):
        seconds = tab.open(page.as_uri(), width, dark=dark)
        wide = tab.value("document.documentElement.scrollWidth")
        assert not tab.complaints, (name, tab.complaints)
        assert tab.requests == [page.as_uri()], (name, tab.requests)
        assert wide <= width, f"{name}: {wide} pixels wide on a screen of {width}"
        print(f"{name:24} {width:5} px {'dark ' if dark else 'light'} {size / 1e6:5.2f} MB {seconds:5.2f} s")
        quickest = min(quickest, seconds)
    # The machine may be busy, and the first page also waits for the browser to wake up.
    assert not bounded or (size < MOST_BYTES and quickest < MOST_SECONDS), (name, size, quickest)
    tab.open(page.as_uri(), 1280)
    assert tab.value("document.querySelector('#timeline canvas').height") > 50
    check_hover(tab)
    check_keys(tab)
    assert not tab.complaints, (name, tab.complaints)


def panel(tab: Tab, section: str) -> str:
    return str(tab.value(f"document.querySelector('#{section} .panel').textContent"))


def check_hover(tab: Tab) -> None:
    tab.point("#ranks .rank")
    assert panel(tab, "ranks").startswith("Rank"), panel(tab, "ranks")
    tab.point("#considered svg circle")
    assert "a step" in panel(tab, "considered")


def check_keys(tab: Tab) -> None:
    """Every figure can be reached with Tab and walked with arrows."""
    seen: set[str] = set()
    tab.value("document.activeElement.blur()")
    for _ in range(60):
        tab.press("Tab")
        where = tab.value("document.activeElement.closest('section')?.id")
        label = str(tab.value("document.activeElement.getAttribute('role')"))
        if where and (label == "application" or where == "ranks") and where not in seen:
            before = panel(tab, where)
            for key in ("ArrowRight", "ArrowRight"):
                tab.press(key)
            if panel(tab, where) != before:
                seen.add(where)
    wanted = set(tab.value("[...document.querySelectorAll('[role=application]')].map((n) => n.closest('section').id)"))
    assert seen >= wanted | {"ranks"}, (seen, wanted)
    tab.value("document.querySelector('#timeline canvas').focus()")
    before = tab.value("document.querySelector('#timeline canvas').toDataURL().length")
    for key in ("+", "+", "+"):
        tab.press(key)
    assert tab.value("document.querySelector('#timeline canvas').toDataURL().length") != before, "zoom"


def take_pictures(tab: Tab, page: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for dark in (False, True):
        tab.open(page.as_uri(), 1100, dark=dark)
        for section in tab.value("[...document.querySelectorAll('main > section')].map((node) => node.id)"):
            tab.picture(folder / f"{section}-{'dark' if dark else 'light'}.png", f"#{section}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=Path, help="where to put pictures of the run's page")
    parser.add_argument("--run", type=Path, help="the folder of a run there is already, with times kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, chromium() as tab:
        folder = Path(name)
        run = given.run or train(folder)
        cuboid("report", str(run), "-o", str(folder / "run.html"))
        check(tab, "demo run", folder / "run.html", bounded=True)
        if given.pictures is not None:
            take_pictures(tab, folder / "run.html", given.pictures)
        for title, (model, cluster, batch, sequence) in PLANS.items():
            plan, page = folder / f"{model}.toml", folder / f"{model}.html"
            cuboid("plan", model, cluster, "--global-batch", str(batch), "--seq", str(sequence), "-o", str(plan))
            cuboid("report", str(plan), "-o", str(page))
            check(tab, title, page, bounded="1,024" in title)
    print("all as it should be")


if __name__ == "__main__":
    main()
