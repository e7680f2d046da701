"""Plans for Muon: less memory, more arithmetic, the same search, and a run file that trains it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cuboid.errors import UserError
from cuboid.planning.choose import plans, predict
from cuboid.planning.explain import explain, memory_lines
from cuboid.planning.export.engines import export
from cuboid.planning.plan import dump_plan, load_plan
from cuboid.planning.question import Question
from cuboid.planning.score import score
from cuboid.planning.search import search
from cuboid.planning.space import Space
from cuboid.spec.layout import Layout
from tests.planning.conftest import DENSE, MIXED, every_layout


@pytest.mark.parametrize("model", [DENSE, MIXED])
@pytest.mark.parametrize("fraction", [0.03, 0.95])
def test_nothing_is_better_than_the_first_answer(ask: Callable[..., Question], model: object, fraction: float) -> None:
    limit = fraction * ask().limit
    question = ask(model, "a100x4", optimizer="muon", memory_limit=limit, fixed={"recompute": "none"})
    layouts = [
        layout
        for layout in every_layout(question, 4)
        if layout.recompute == "none" and (layout.dp * layout.cp > 1 or not layout.zero)
    ]
    scores = score(question, Space.of(layouts, question))
    found = search(question, 4, keep=3)
    if not scores.fits.any():
        assert len(found.space) == 0
        return
    assert found.seconds[0] == pytest.approx(float(np.min(scores.seconds[scores.fits])), rel=1e-8)


def test_it_takes_less_memory_and_more_time(ask: Callable[..., Question], tmp_path: Path) -> None:
    layout = Layout.parse("dp=4,tp=2,zero=1")
    adamw, muon = (predict(ask("llama3-8b", "h100x8", optimizer=kind), layout) for kind in ("adamw", "muon"))
    assert muon.memory[0]["optimizer"] < 0.75 * adamw.memory[0]["optimizer"]
    assert muon.parts["optimizer"] > adamw.parts["optimizer"]
    (tmp_path / "plan.toml").write_text(dump_plan(muon))
    loaded = load_plan(tmp_path / "plan.toml")
    assert loaded.question.optimizer == "muon" and loaded.run.optimizer.is_muon
    lines = memory_lines(explain(loaded.question, loaded.layout))
    assert any("6 bytes" in line and "of AdamW's second moments" in line for line in lines)


def test_nothing_is_offloaded(ask: Callable[..., Question]) -> None:
    assert ask("llama3-8b", "h100x8").tries_offload
    assert not ask("llama3-8b", "h100x8", optimizer="muon").tries_offload
    assert not plans(ask("llama3-8b", "h100x8", optimizer="muon"), top=1)[0].layout.offload


def test_no_other_engine_gets_it(ask: Callable[..., Question]) -> None:
    plan = predict(ask("llama3-8b", "h100x8", optimizer="muon"), Layout.parse("dp=8,zero=1"))
    with pytest.raises(UserError, match=r"optimizer\.kind=muon is not among what is written for megatron"):
        export(plan, "megatron")


def test_what_is_not_counted_is_refused(ask: Callable[..., Question]) -> None:
    with pytest.raises(UserError, match="unknown optimizer=lion; use optimizer=adamw or optimizer=muon"):
        ask(optimizer="lion")
    with pytest.raises(UserError, match="optimizer=muon is counted for models of the catalog and engine=cuboid"):
        ask(optimizer="muon", engine="megatron")
