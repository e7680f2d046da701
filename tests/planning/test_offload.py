"""The planner offloads where nothing fits without, says what that takes, and heeds the nodes' memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cuboid.errors import UserError
from cuboid.planning.choose import plans, predict
from cuboid.planning.plan import GIB, dump_plan, load_plan
from cuboid.planning.question import Question
from cuboid.spec.layout import Layout

Ask = Callable[..., Question]


@pytest.fixture
def tight(ask: Ask) -> Question:
    """Sixteen billion bytes of weights and as many of gradients fit an H100, ten a parameter more do not."""
    return ask("llama3-8b", "h100x1", global_batch=8, sequence=4096)


def test_a_model_whose_optimizer_does_not_fit_is_planned_with_offload(tight: Question, tmp_path: Path) -> None:
    best = plans(tight)[0]
    assert best.layout.offload
    assert best.peak <= tight.limit
    profile = tight.profile
    assert best.host_memory == pytest.approx(profile.optimizer_bytes * tight.model.parameters, rel=1e-3)
    assert any(f"offload=true keeps {best.host_memory / GIB:.1f} GiB" in reason for reason in best.reasons)
    link = best.host_memory / tight.machine.chip.host_link
    assert 0.04 * link < best.parts["optimizer"] < link + 0.1
    (tmp_path / "plan.toml").write_text(dump_plan(best))
    again = load_plan(tmp_path / "plan.toml")
    assert again.layout == best.layout
    assert again.host_memory == pytest.approx(best.host_memory)


def test_offloading_can_be_ruled_out(tight: Question) -> None:
    with pytest.raises(UserError, match="too small"):
        plans(replace(tight, fixed={"offload": False}))


def test_what_fits_without_is_not_offloaded(ask: Ask) -> None:
    assert not any(plan.layout.offload for plan in plans(ask("llama3-8b", "h100x8", sequence=2048)))


def test_what_the_user_fixes_is_offloaded(ask: Ask) -> None:
    assert all(plan.layout.offload for plan in plans(ask(fixed={"offload": True})))


def test_nodes_with_too_little_memory_are_refused(tight: Question) -> None:
    small = replace(tight.cluster, host_memory_gib=64.0)
    with pytest.raises(UserError, match="too small"):
        plans(replace(tight, cluster=small))
    large = replace(tight.cluster, host_memory_gib=256.0)
    assert plans(replace(tight, cluster=large))[0].layout.offload
    told = predict(replace(tight, cluster=small), Layout(offload=True, recompute="full")).warnings
    assert any("host_memory_gib=64" in warning for warning in told)


def test_on_cpus_offloading_changes_nothing(ask: Ask) -> None:
    question = ask(cluster="cpux2")
    here, there = (predict(question, Layout(dp=2, offload=flag)) for flag in (False, True))
    assert there.host_memory == 0
    assert (there.memory, there.parts) == (here.memory, here.parts)
