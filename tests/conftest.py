"""What all tests share: one pool of rank processes for the whole session, the option for the long way, and the profile
of property tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from cuboid.launch.pool import Pool

# Property tests are quick but may share their cores with rank processes: no deadline for one example.
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="try every combination and many random layouts")


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Rank processes that have torch imported and are reused from test to test."""
    with Pool() as ranks:
        yield ranks
