"""What a run trained on one layout writes on another, without an export between."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuboid.checkpoint.huggingface.export import export_model
from cuboid.errors import UserError
from cuboid.generate.target import find_target
from cuboid.launch.pool import Pool
from cuboid.spec.generation import GenerationSpec, SamplingSpec, parse_layout
from cuboid.spec.run import build_run
from cuboid.training.run_folder import prepare_folder
from tests.generate.jobs import together
from tests.generate.test_equality import END, requests, theirs

MODEL = {"base": "tiny-llama", "layers": 3, "hidden": 32, "ffn": 48, "heads": 4, "kv_heads": 2}


def test_a_checkpoint_of_one_layout_generates_on_another(pool: Pool, tmp_path: Path) -> None:
    run = build_run(
        {
            "model": MODEL,
            "layout": "tp=2,pp=2,zero=1",
            "training": {"steps": 2, "global_batch": 4, "sequence": 16, "device": "cpu"},
            "learning_rate": {"peak": 0.01},
            "checkpoint": {"every": 2},
            "output": {"folder": str(tmp_path / "run")},
        }
    )
    prepare_folder(run)
    pool.run("tests.training.cases:train_rank", (run,), ranks=4)
    target = find_target(str(tmp_path / "run"))
    assert target.words.ends == (END,)
    assert target.words.decode(target.words.encode("né")) == "né"
    export_model(tmp_path / "run", tmp_path / "exported")
    expected = theirs(tmp_path / "exported")
    exported = find_target(f"hf:{tmp_path / 'exported'}")
    assert exported.words.ends == (END,)
    for found, layout in ((target, "dp=2,cp=2"), (target, "pp=3"), (exported, "tp=4")):
        spec = GenerationSpec(
            model=found.model, layout=parse_layout(layout), weights=found.weights, slots=2, length=40, device="cpu"
        )
        job = (spec, requests(), [(SamplingSpec(), found.words)])
        (written,) = together(pool.run("tests.generate.jobs:texts", job, ranks=spec.layout.world_size))
        assert written == expected, layout


def test_what_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; name a run's folder, one of its checkpoints, or hf:FOLDER"):
        find_target(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no checkpoint"):
        find_target(str(tmp_path))
    with pytest.raises(UserError, match=r"has no config\.json"):
        find_target(f"hf:{tmp_path}")
