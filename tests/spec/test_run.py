"""Runs: TOML round trip, overrides typed by their field, and refusals that name the key."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuboid.errors import UserError
from cuboid.spec.layout import Layout
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec, RopeScaling
from cuboid.spec.optimizer import OptimizerSpec
from cuboid.spec.run import (
    LearningRateSpec,
    OutputSpec,
    Run,
    TrainingSpec,
    build_run,
    dump_run,
    load_run,
)

PLAIN = {"model": "tiny-llama"}


def refusal(overrides: list[str], table: dict[str, object] = PLAIN) -> str:
    with pytest.raises(UserError) as caught:
        build_run(table, overrides)
    return str(caught.value)


def test_a_run_needs_only_a_model() -> None:
    run = build_run(PLAIN)
    assert (run.model.name, run.layout, run.training.steps) == ("tiny-llama", Layout(), 100)
    assert refusal([], {}) == 'model is missing; write model = "tiny-llama" or a [model] table'


@given(
    steps=st.integers(1, 10**9),
    peak=st.floats(0, 1),
    epsilon=st.floats(1e-300, 1),
    folder=st.text(min_size=1).filter(lambda text: "\r" not in text and "\0" not in text),
    deterministic=st.booleans(),
)
def test_round_trip_is_exact(steps: int, peak: float, epsilon: float, folder: str, deterministic: bool) -> None:
    run = Run(
        model=ModelSpec(hidden=64, layers=4, heads=4, head_dim=32, ffn=64, vocab=100, norm_epsilon=epsilon),
        layout=Layout(dp=2, tp=2, schedule="zbv", sequence_parallel=False),
        training=TrainingSpec(steps=steps, deterministic=deterministic),
        optimizer=OptimizerSpec(epsilon=epsilon),
        learning_rate=LearningRateSpec(peak=peak, schedule="wsd"),
        output=OutputSpec(folder=folder),
    )
    assert build_run(tomllib.loads(dump_run(run))) == run


def test_round_trip_keeps_nested_tables() -> None:
    scaling = RopeScaling(factor=8, low_frequency_factor=1, high_frequency_factor=4, original_positions=8192)
    mixture = MixtureSpec(experts=8, top_k=2, expert_ffn=32)
    model = ModelSpec(hidden=64, layers=4, heads=4, ffn=64, vocab=100, rope_scaling=scaling, mixture=mixture)
    run = Run(model=model)
    assert build_run(tomllib.loads(dump_run(run))) == run


def test_every_catalog_family_round_trips() -> None:
    for name in ("tiny-llama", "tiny-gpt2", "tiny-qwen3"):
        run = build_run({"model": name})
        assert build_run(tomllib.loads(dump_run(run))) == run


def test_run_files_find_models_beside_them(tmp_path: Path) -> None:
    (tmp_path / "shape.toml").write_text('base = "tiny-llama"\nlayers = 3\n')
    (tmp_path / "run.toml").write_text('model = "shape.toml"\nlayout = "dp=2,pp=3"\n[training]\nsteps = 7\n')
    run = load_run(tmp_path / "run.toml", ["training.global_batch=4"])
    assert (run.model.name, run.model.layers, run.model.ffn) == ("shape", 3, 192)
    assert (run.layout.world_size, run.training.steps, run.micro_batches) == (6, 7, 2)


def test_model_table_changes_a_base() -> None:
    run = build_run({"model": {"base": "tiny-gpt2", "layers": 2, "name": "short"}})
    assert (run.model.name, run.model.layers, run.model.norm) == ("short", 2, "layernorm")


def test_overrides_are_typed_by_their_field() -> None:
    overrides = [
        "training.steps=20",
        "training.deterministic=true",
        "training.precision=bf16",
        "learning_rate.peak=1e-3",
        "optimizer.weight_decay=0",
        "output.folder=runs/a=b",
    ]
    run = build_run(PLAIN, overrides)
    assert (run.training.steps, run.training.deterministic, run.training.precision) == (20, True, "bf16")
    assert (run.learning_rate.peak, run.optimizer.weight_decay, run.output.folder) == (1e-3, 0.0, "runs/a=b")


def test_overrides_reach_into_names_and_strings() -> None:
    run = build_run(
        {"model": "tiny-llama", "layout": "dp=2,tp=2"}, ["model.hidden=128", "layout.schedule=zbv", "layout.tp=1"]
    )
    assert run.model.head_dim == 16, "what follows from the changed field follows it"
    assert (run.layout.dp, run.layout.tp, run.layout.vpp, run.layout.sequence_parallel) == (2, 1, 2, False)


def test_overrides_replace_model_and_layout_whole() -> None:
    run = build_run(
        {"model": "tiny-llama", "layout": "dp=2"}, ["model=tiny-gpt2", "layout=tp=4,pp=2", "model.layers=3"]
    )
    assert (run.model.name, run.model.layers, str(run.layout)) == ("tiny-gpt2", 3, "dp=1,tp=4,pp=2")
    assert build_run(PLAIN, ["model.base=tiny-qwen3"]).model.qk_norm


def test_overrides_fill_and_clear_nested_tables() -> None:
    values = {"factor": 8, "low_frequency_factor": 1, "high_frequency_factor": 4, "original_positions": 64}
    overrides = [f"model.rope_scaling.{key}={value}" for key, value in values.items()]
    assert build_run(PLAIN, overrides).model.rope_scaling == RopeScaling(**values)
    assert build_run(PLAIN, [*overrides, "model.rope_scaling=none"]).model.rope_scaling is None
    assert "rope_scaling.high_frequency_factor is missing" in refusal(overrides[:2])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("training.stps=3", "unknown key training.stps; did you mean training.steps?"),
        ("trainin.steps=3", "unknown key trainin; did you mean training?"),
        ("model.layer=3", "unknown key model.layer; did you mean model.layers"),
        ("layout.tq=3", "unknown key layout.tq; did you mean layout.tp?"),
        ("training.steps.more=3", "unknown key training.steps.more; training.steps is a single value, not a table"),
        ("training.steps=ten", "training.steps=ten has the wrong type; it must be an integer"),
        ("training.steps=1.5", "training.steps=1.5 has the wrong type; it must be an integer"),
        ("training.steps=0", "training.steps=0 is too small; use steps=1 or more"),
        ("learning_rate.peak=nan", "learning_rate.peak=nan is not finite; it must be a finite number"),
        ("learning_rate.peak=1e308", "learning_rate.peak=1e+308 is too large for float32; use a number of at most"),
        ("optimizer.weight_decay=-1e39", "optimizer.weight_decay=-1e+39 is too large for float32; use a number of at"),
        ("learning_rate.minimum_ratio=2", "learning_rate.minimum_ratio=2.0 is too large; use minimum_ratio=1 or less"),
        (
            "training.deterministic=1",
            "training.deterministic=1 is not true or false; use training.deterministic=true or training.deterministic=",
        ),
        ("training.precision=fp4", 'training.precision="fp4" is unknown; use '),
        ("training.steps", "override 'training.steps' has no value; write it like training.steps=20"),
        ("training=3", "training=3 would replace a whole table; set one field, like training.steps"),
        ("optimizer.beta1=1", "optimizer.beta1=1.0 never forgets; use a number below 1"),
        ("model=tiny-lama", "unknown model=tiny-lama; did you mean tiny-llama"),
        ("layout=tp=3", "tp=3 does not divide heads=8; use tp=2 or tp=4"),
    ],
)
def test_bad_overrides_are_refused_in_one_sentence(override: str, sentence: str) -> None:
    assert refusal([override]).startswith(sentence)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"training": {"steps": "ten"}}, 'training.steps="ten" is a string; it must be an integer'),
        ({"training": {"steps": True}}, "training.steps=true is true or false; it must be an integer"),
        ({"training": 3}, "training=3 is not a table; write it as [training]"),
        ({"trainig": {}}, "unknown key trainig; did you mean training"),
        ({"training": {"sequense": 3}}, "unknown key training.sequense; did you mean training.sequence"),
        ({"layout": 3}, "layout=3 is not a table"),
        ({"layout": {"tp": "2"}}, 'layout.tp="2" is a string; it must be an integer'),
        ({"model": {"base": 3}}, "model.base=3 is not a string"),
        ({"model": {"base": "tiny-llama", "layrs": 3}}, "unknown key model.layrs; did you mean model.layers"),
        ({"model": {"hidden": 64}}, "model.layers is missing; it must be an integer"),
        ({"output": {"folder": ""}}, 'output.folder="" names no folder'),
    ],
)
def test_bad_tables_are_refused_in_one_sentence(table: dict[str, object], sentence: str) -> None:
    assert refusal([], {**PLAIN, **table}).startswith(sentence)


def test_kernels_chosen_by_their_speed_are_not_the_same_each_time() -> None:
    sentence = refusal(["training.deterministic=true", "training.compile=on"])
    assert sentence.startswith("training.compile=on") and sentence.endswith("use training.compile=auto or off")


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml does not exist"):
        load_run(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("model = \n")
    with pytest.raises(UserError, match=r"broken\.toml is not TOML: .*line 1"):
        load_run(tmp_path / "broken.toml")


def test_exchanges_go_under_products_where_that_can_be() -> None:
    on = "training.overlap_tensor=on"
    assert build_run(PLAIN, [on]).training.overlap_tensor == "on"
    assert "training.device=cpu" in refusal([on, "training.device=cpu"])
    assert "training.compile=on" in refusal([on, "training.compile=off"])
    assert "training.compile=on" in refusal([on, "training.precision=float64"])
    assert "sequence_parallel=true" in refusal([on, "layout=tp=2,sequence_parallel=false"])
    assert "output.count_communication=true" in refusal([on, "layout=tp=2", "output.count_communication=true"])


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        (["layout=dp=1,pp=2"], "one rank, or only dp and tp with zero=0, 1 or 2, not layout=dp=1,tp=1,pp=2"),
        (["layout=dp=2,zero=3"], "one rank, or only dp and tp with zero=0, 1 or 2, not layout=dp=2,tp=1,pp=1,zero=3"),
        (["layout=tp=2", "training.overlap_tensor=auto"], "training.overlap_tensor=off"),
        (["data.attention_within_documents=true"], "data.attention_within_documents=false"),
        (["training.device=cpu"], "a GPU, not training.device=cpu"),
        (["training.precision=float64"], "compiled blocks"),
        (["profile.steps=3"], "a run that is not profiled"),
    ],
)
def test_what_cuda_graphs_need(changes: list[str], need: str) -> None:
    on = "training.cuda_graphs=on"
    assert build_run(PLAIN, [on]).obstacle_to_graphs == ""
    assert build_run(PLAIN, [on, "layout=dp=2,tp=2,zero=2"]).obstacle_to_graphs == ""
    with pytest.raises(UserError) as error:
        build_run(PLAIN, [on, *changes])
    assert str(error.value) == f"training.cuda_graphs=on needs {need}; use cuda_graphs=auto"
    assert build_run(PLAIN, ["training.cuda_graphs=auto", *changes]).obstacle_to_graphs == need
