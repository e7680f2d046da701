"""What all tests share: one pool of rank processes for the whole session, the option for the long way, and the profile
of property tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cuboid.launch.pool import PRELOADED, Pool
from tests.report.browser import find_chromium

# Read when torch is imported. What tests compute themselves is small: more threads would only disturb rank processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PRELOADED[:] = ["tests.preload"]
# Of what is imported while tests are collected nothing is garbage: it is looked at neither then nor later.
gc.disable()

# Property tests are quick but may share their cores with rank processes: no example is too slow. They try the same
# examples each time, so that none fails by chance; with --thorough, new ones.
slow = [HealthCheck.too_slow]
settings.register_profile("certain", deadline=None, suppress_health_check=slow, derandomize=True)
settings.register_profile("thorough", deadline=None, suppress_health_check=slow)

LONGEST = Path(__file__).with_name("longest.txt")
"""Files that take long begin first, the longest of them foremost, so that none is left when the others are done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="try every combination and many random layouts")
    parser.addoption("--browser", action="store_true", help="fail where no Chromium is there for tests of pages")
    parser.addoption("--note-longest", action="store_true", help="write down which files took longest: longest.txt")
    parser.addoption("--pictures", help="folder for the pictures of pages that the browser's tests take")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("--thorough") else "certain")
    if config.getoption("--note-longest") and not hasattr(config, "workerinput"):  # of several workers, who hears all
        config.pluginmanager.register(Times())
    config.addinivalue_line("markers", "browser: opens pages in a real Chromium")
    config.addinivalue_line("markers", "thorough: takes long and is tried with --thorough only")


class Times:
    """How long each file takes."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition(".py::")[0].removeprefix("tests/")] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest = [name for name, seconds in self._seconds.most_common() if seconds > 0.005 * self._seconds.total()]
        LONGEST.write_text("\n".join(longest) + "\n")


def pytest_report_header(config: pytest.Config) -> str:
    return f"browser: {find_chromium() or 'no chromium, so tests marked browser are skipped (--browser insists)'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leaves = {"browser"} if not (find_chromium() or config.getoption("--browser")) else set()
    leaves |= {"thorough"} if not config.getoption("--thorough") else set()
    left = [item for item in items if any(item.get_closest_marker(name) for name in leaves)]
    config.hook.pytest_deselected(items=left)
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST.read_text().split())}
    items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes that have torch imported and are reused from test to test."""
    with Pool() as ranks:
        yield ranks
