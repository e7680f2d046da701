"""A row for every slot computes what a row for every sequence does, whichever slots are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cuboid.generate.batch import Span, Step
from cuboid.generate.build import Builder, make_generation_groups
from cuboid.generate.cache import Rower
from cuboid.generate.cuda_graphs import FixedDecoder
from cuboid.model.rope import PositionTable
from tests.checkpoint.pretrained import save_pretrained
from tests.generate.test_equality import LENGTH, spec

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", ["llama", "gpt2", "deepseek-v3", "gemma3", "gpt-oss"])
def test_fixed_rows_are_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """Where no graph can be recorded, as without CUDA, it says so once and continues."""
    records = not torch.cuda.is_available()
    asked = spec(save_pretrained(tmp_path / "model", case), "dp=1", slots=5, precision="float64")
    groups = make_generation_groups(asked, 0, CPU)
    builder = Builder(asked, groups, groups.context_outer, CPU)
    stage = builder.stage(range(asked.model.layers))
    builder.load()
    like = torch.empty(0, dtype=torch.float64)
    table = PositionTable(asked.model, LENGTH, torch.float64, CPU)
    rower = Rower(table, groups.context_outer, LENGTH, 1, like)
    fixed = FixedDecoder(stage, table, range(1, 5), LENGTH, like, records=records)

    def logits(step: Step) -> torch.Tensor:
        rows = rower.rows(step)
        return stage.logits(stage.hidden(rows.tokens, rows.positions)[rows.asked])

    with torch.inference_mode():
        texts = {1: [5, 6, 7], 2: [8], 4: [1, 2, 3, 4, 9]}
        logits(Step(tuple(Span(slot, 0, tuple(text[:-1] or text), 1) for slot, text in texts.items())))
        for taken in ((1, 2, 4), (2, 4), (4,), (1,)):
            step = Step(tuple(Span(slot, len(texts[slot]) - 1, (texts[slot][-1],), 1) for slot in taken))
            torch.testing.assert_close(fixed(step), logits(step), rtol=0, atol=1e-12)
            for slot in taken:
                texts[slot].append(11 * slot)
    assert capsys.readouterr().err.count("no graph can be recorded") == int(records)
