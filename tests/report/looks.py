"""What a report's page must do in a real browser, whichever page it is."""

from __future__ import annotations

from pathlib import Path

from tests.report.browser import Tab

MOST_BYTES = 3_000_000
TITLE, LANE, WINDOW = 24, 29, 800
"""Pixels: above the lanes of the timeline, of one lane, and what of a window is surely seen."""


def check_open(tab: Tab, page: Path, width: int = 1280, dark: bool = False) -> float:
    """It is drawn without complaint, asks for nothing but itself and is no wider than the screen; seconds it took."""
    seconds = tab.open(page.as_uri(), width, dark=dark)
    wide = tab.value("document.documentElement.scrollWidth")
    assert not tab.complaints, (page.name, tab.complaints)
    assert tab.requests == [page.as_uri()], (page.name, tab.requests)
    assert wide <= width, f"{page.name}: {wide} pixels wide on a screen of {width}"
    assert tab.value("document.querySelector('#timeline canvas').height") > 50
    assert page.stat().st_size < MOST_BYTES
    return seconds


def panel(tab: Tab, section: str) -> str:
    return str(tab.value(f"document.querySelector('#{section} .panel').textContent"))


def check_hover(tab: Tab) -> None:
    tab.point("#ranks .rank")
    assert panel(tab, "ranks").startswith("Rank"), panel(tab, "ranks")
    tab.point("#considered svg circle")
    assert "a step" in panel(tab, "considered")
    # Somewhere in a lane of the timeline, one in the middle of the window, there is work to point at.
    high = tab.value("document.querySelector('#timeline canvas').getBoundingClientRect().height")
    lane = max(0, round((high / 2 - TITLE) / LANE)) if high > WINDOW else 0
    for place in range(8, 96, 4):
        tab.point("#timeline canvas", place / 100, (TITLE + (lane + 0.5) * LANE) / high)
        if "micro-batch" in str(tab.value("document.getElementById('tip').textContent")):
            return
    raise AssertionError("nothing is told of the timeline")


def check_keys(tab: Tab) -> None:
    """Every figure can be reached with Tab and walked with arrows; the timeline zooms with plus."""
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
    low, high = view(tab)
    for key in ("+", "+", "+"):
        tab.press(key)
    assert (view(tab)[1] - view(tab)[0]) * 2 < high - low
    tab.press("0")
    assert view(tab) == (low, high)


def view(tab: Tab) -> tuple[float, float]:
    """From when to when the timeline shows, in its own unit."""
    first, last = tab.value("(({from, to}) => [+from, +to])(document.querySelector('#timeline canvas').dataset)")
    return first, last


def check_pinch(tab: Tab) -> None:
    """Two fingers that part show less, and what was between them stays."""
    low, high = view(tab)
    tab.pinch("#timeline canvas", (0.45, 0.55), (0.3, 0.7))
    closer = view(tab)
    assert low < closer[0] < closer[1] < high
    assert (closer[1] - closer[0]) * 3 < high - low
    assert abs((closer[0] + closer[1]) / 2 - (low + high) / 2) < 0.1 * (high - low)
    tab.press("0")


def take_pictures(tab: Tab, page: Path, folder: Path, *names: str) -> None:
    """Of sections, each named as the file will be: run-timeline."""
    folder.mkdir(parents=True, exist_ok=True)
    tab.open(page.as_uri(), 1000)
    for name in names:
        tab.picture(folder / f"{name}.png", f"#{name.partition('-')[2]}")
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
