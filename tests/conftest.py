"""What all tests share: one pool of rank processes for the whole session, the option for the long way, and the profile
of property tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

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

LONGEST = """
launch/test_ray_cluster checkpoint/test_kill planning/test_search docs/test_tutorial parallel/test_equality
parallel/test_precision
cli/test_train parallel/test_experts parallel/test_compiled planning/test_explain checkpoint/test_huggingface_export
launch/test_once launch/test_oom parallel/test_context resilience/test_preemption parallel/test_overlap
docs/test_commands report/test_browser training/test_killed_chain launch/test_node resilience/test_standstill
cli/test_verify
resilience/test_bad_hardware generate/test_equality data/test_build resilience/test_hang training/test_offload
parallel/test_communication checkpoint/test_moments training/test_bad_steps checkpoint/test_full_disk
launch/test_backend cli/test_plan parallel/test_async_tp checkpoint/test_start training/test_profile
planning/test_choose parallel/test_nccl_model training/test_training cli/test_replay checkpoint/test_memory
training/test_memory_restart parallel/test_shm_collectives verification/test_rounding training/test_bit_identical
training/test_health training/test_muon launch/test_chaos
probe/test_one_rank training/test_resume launch/test_scale launch/test_pool parallel/test_memory
parallel/test_recompute parallel/test_random_layouts checkpoint/test_resume model/test_initialize
checkpoint/test_saver probe/test_probe parallel/test_step training/test_layer_norms parallel/test_loss_scale
""".split()
"""Files that take long begin first, the longest of them foremost, so that none is left when the others are done."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="try every combination and many random layouts")
    parser.addoption("--browser", action="store_true", help="fail where no Chromium is there for tests of pages")
    parser.addoption("--pictures", help="folder for the pictures of pages that the browser's tests take")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("--thorough") else "certain")
    config.addinivalue_line("markers", "browser: opens pages in a real Chromium")
    config.addinivalue_line("markers", "thorough: takes long and is tried with --thorough only")


def pytest_report_header(config: pytest.Config) -> str:
    return f"browser: {find_chromium() or 'no chromium, so tests marked browser are skipped (--browser insists)'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leaves = {"browser"} if not (find_chromium() or config.getoption("--browser")) else set()
    leaves |= {"thorough"} if not config.getoption("--thorough") else set()
    left = [item for item in items if any(item.get_closest_marker(name) for name in leaves)]
    config.hook.pytest_deselected(items=left)
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
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
