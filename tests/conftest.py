"""What all tests share: one pool of rank processes for the whole session, the option for the long way, and the profile
of property tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from cuboid.launch.pool import Pool
from tests.report.browser import find_chromium

# Property tests are quick but may share their cores with rank processes: no deadline for one example.
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="try every combination and many random layouts")
    parser.addoption("--browser", action="store_true", help="fail where no Chromium is there for tests of pages")
    parser.addoption("--pictures", help="folder for the pictures of pages that the browser's tests take")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: opens pages in a real Chromium")
    config.addinivalue_line("markers", "thorough: takes long and is tried with --thorough only")


def pytest_report_header(config: pytest.Config) -> str:
    return f"browser: {find_chromium() or 'no chromium, so tests marked browser are left out (--browser insists)'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leaves = {"browser"} if not (find_chromium() or config.getoption("--browser")) else set()
    leaves |= {"thorough"} if not config.getoption("--thorough") else set()
    left = [item for item in items if any(item.get_closest_marker(name) for name in leaves)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes that have torch imported and are reused from test to test."""
    with Pool() as ranks:
        yield ranks
