"""Exported files parse with the target's own key names, and what a target cannot say is refused by name."""

import ast
import json
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from cuboid.errors import UserError
from cuboid.planning.choose import plans, predict
from cuboid.planning.export.engines import FIXED, TARGETS, export, refuse_model, refuse_recipe
from cuboid.planning.export.megatron import stage_layout
from cuboid.planning.plan import Plan
from cuboid.planning.question import Question
from cuboid.spec.deepspeed import run_table_from_deepspeed
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec, load_model
from cuboid.spec.run import build_run


@pytest.fixture
def plan(ask: Callable[..., Question]) -> Callable[..., Plan]:
    def make(layout: str, model: str | ModelSpec = "llama3-8b", cluster: str = "h100x16", **more: Any) -> Plan:
        return predict(ask(model, cluster, **{"global_batch": 64, "sequence": 4096, **more}), Layout.parse(layout))

    return make


def flags_of(script: str) -> dict[str, str]:
    """Flags of the script after the program's name -> their values."""
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    after = words[words.index("pretrain_gpt.py") + 1 : -1]
    found: dict[str, str] = {}
    key = ""
    for word in after:
        if word.startswith("--"):
            key = word
            found[key] = ""
        else:
            found[key] = (found[key] + " " + word).strip()
    return found


def test_megatron_has_every_method_of_context_parallelism(plan: Callable[..., Plan]) -> None:
    kinds = {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather", "hybrid": "a2a+p2p"}
    for method, kind in kinds.items():
        flags = flags_of(export(plan(f"dp=2,cp=8,zero=1,cp_method={method}"), "megatron"))
        assert (flags["--context-parallel-size"], flags["--cp-comm-type"]) == ("8", kind)
        assert flags.get("--hierarchical-context-parallel-sizes") == ("4 2" if method == "hybrid" else None)


def test_offloading_is_said_where_the_target_has_it_and_refused_where_not(plan: Callable[..., Plan]) -> None:
    away = plan("dp=16,zero=1,offload=true")
    assert "--optimizer-cpu-offload" in flags_of(export(away, "megatron"))
    config = json.loads(export(away, "deepspeed"))
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert run_table_from_deepspeed(config, 16)["layout"] == str(away.layout)
    for target, layout in (("torchtitan", "dp=16,zero=2"), ("nanotron", "dp=16,zero=1"), ("deepspeed", "dp=16")):
        with pytest.raises(UserError, match="offload=true"):
            export(plan(f"{layout},offload=true"), target)


def test_megatron(plan: Callable[..., Plan]) -> None:
    script = export(plan("dp=2,tp=4,pp=2,zero=1,recompute=full,micro_batch=2"), "megatron")
    flags = flags_of(script)
    assert flags["--tensor-model-parallel-size"] == "4"
    assert flags["--pipeline-model-parallel-size"] == "2"
    assert flags["--micro-batch-size"] == "2"
    assert flags["--global-batch-size"] == "64"
    assert flags["--seq-length"] == "4096"
    assert flags["--num-layers"] == "32"
    assert flags["--num-query-groups"] == "8"
    assert flags["--recompute-granularity"] == "full"
    assert flags["--pipeline-model-parallel-layout"] == "Et*17|t*15L"
    expected = ("--sequence-parallel", "--use-distributed-optimizer", "--swiglu", "--bf16", "--group-query-attention")
    assert all(name in flags for name in (*expected, "--untie-embeddings-and-output-weights", "--disable-bias-linear"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in script
    assert "dp=2" in script


def test_megatron_interleaved_and_fully_sharded(plan: Callable[..., Plan]) -> None:
    flags = flags_of(export(plan("dp=2,tp=4,pp=2,schedule=interleaved,vpp=2", "gpt-22b", sequence=2048), "megatron"))
    assert flags["--num-virtual-stages-per-pipeline-rank"] == "2" or "|" in flags["--pipeline-model-parallel-layout"]
    assert flags["--position-embedding-type"] == "learned_absolute"
    script = export(plan("dp=8,tp=2,zero=3,shard=4", precision="fp8"), "megatron")
    flags = flags_of(script)
    assert flags["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert flags["--num-distributed-optimizer-instances"] == "2"
    assert flags["--fp8-format"] == "hybrid"
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in script


def test_scales_of_fp8_are_named_or_refused(plan: Callable[..., Plan]) -> None:
    def written(target: str, scaling: str, **more: Any) -> str:
        return export(plan("dp=8,tp=2,zero=3,shard=4", precision="fp8", fp8_scaling=scaling, **more), target)

    flags = flags_of(written("megatron", "block"))
    assert (flags["--fp8-recipe"], flags["--fp8-format"]) == ("blockwise", "e4m3")
    assert tomllib.loads(written("torchtitan", "row"))["quantize"]["linear"]["float8"]["recipe_name"] == "rowwise"
    for target, scaling in (("megatron", "row"), ("torchtitan", "block")):
        with pytest.raises(UserError, match=f"fp8_scaling={scaling} is no recipe of {target}"):
            written(target, scaling)


def test_megatron_mixture_with_latent_attention(plan: Callable[..., Plan]) -> None:
    flags = flags_of(export(plan("dp=8,tp=1,pp=8,ep=8,zero=1", "deepseek-v3", "h100x64"), "megatron"))
    assert flags["--expert-model-parallel-size"] == "8"
    assert flags["--num-experts"] == "256"
    assert flags["--moe-layer-freq"] == "([0]*3+[1]*58)"
    assert flags["--kv-lora-rank"] == "512"
    assert "--multi-latent-attention" in flags
    assert (flags["--moe-router-load-balancing-type"], flags["--moe-aux-loss-coeff"]) == ("seq_aux_loss", "0.1")
    assert flags["--moe-router-bias-update-rate"] == "0.001"
    assert flags["--moe-router-score-function"] == "sigmoid"
    assert (flags["--moe-router-num-groups"], flags["--moe-router-group-topk"]) == ("8", "4")
    assert flags["--moe-router-topk-scaling-factor"] == "2.5"
    assert (flags["--rotary-scaling-factor"], flags["--mscale"], flags["--mscale-all-dim"]) == ("40.0", "1.0", "1.0")
    assert "--qk-layernorm" in flags
    flags = flags_of(export(plan("dp=8,tp=1,pp=8,ep=8,zero=1", "deepseek-v2", "h100x64"), "megatron"))
    assert "--moe-router-pre-softmax" in flags


def test_stage_layout_of_megatron() -> None:
    assert stage_layout((3, 4, 2)) == "Et*3|t*4|t*2L"


def test_deepspeed_comes_back_through_the_importer(plan: Callable[..., Plan]) -> None:
    made = plan("dp=8,pp=2,zero=1,recompute=full")
    config = json.loads(export(made, "deepspeed"))
    assert config["train_batch_size"] == 64
    assert config["gradient_accumulation_steps"] == 8
    assert config["zero_optimization"]["stage"] == 1
    assert config["pipeline"]["stages"] == 2
    assert config["bf16"] == {"enabled": True}
    table = run_table_from_deepspeed(config, world_size=16)
    again = Layout.parse(table["layout"])
    assert (again.dp, again.tp, again.pp, again.zero, again.micro_batch) == (8, 1, 2, 1, 1)
    assert again.recompute == "full"
    rate = made.run.learning_rate
    assert (table["learning_rate"]["schedule"], table["learning_rate"]["peak"]) == (rate.schedule, rate.peak)
    assert table["learning_rate"]["minimum_ratio"] == rate.minimum_ratio


def test_deepspeed_counts_tensor_ranks_as_replicas(plan: Callable[..., Plan]) -> None:
    """With tp and no pipeline it multiplies the micro-batch by all ranks, so the matmul is left to it."""
    config = json.loads(export(plan("dp=8,tp=2,zero=1,sequence_parallel=false"), "deepspeed"))
    assert "train_batch_size" not in config
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 8)
    assert config["tensor_parallel"] == {"autotp_size": 2}


def test_torchtitan(plan: Callable[..., Plan]) -> None:
    table = tomllib.loads(export(plan("dp=4,tp=2,pp=2,zero=3,schedule=zbv,recompute=selective"), "torchtitan"))
    assert table["model"] == {"name": "llama3", "flavor": "8B"}
    parallel = table["parallelism"]
    assert parallel["data_parallel_shard_degree"] == 4
    assert parallel["data_parallel_replicate_degree"] == 1
    assert parallel["tensor_parallel_degree"] == 2
    assert parallel["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert parallel["fsdp_reshard_after_forward"] == "always"
    parts = parallel["module_fqns_per_model_part"]
    assert len(parts) == 4
    assert parts[0][0] == "tok_embeddings"
    assert parts[-1][-2:] == ["norm", "output"]
    assert sum(name.startswith("layers.") for part in parts for name in part) == 32
    assert table["training"]["local_batch_size"] == 16
    assert table["training"]["global_batch_size"] == 64
    assert table["activation_checkpoint"]["mode"] == "selective"


def test_torchtitan_without_a_pipeline_accumulates(plan: Callable[..., Plan]) -> None:
    table = tomllib.loads(export(plan("dp=8,tp=2,zero=2,shard=4,micro_batch=2", precision="fp8"), "torchtitan"))
    assert table["training"]["local_batch_size"] == 2
    assert table["parallelism"]["data_parallel_replicate_degree"] == 2
    assert table["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert table["model"]["converters"] == ["quantize.linear.float8"]


def test_nanotron(plan: Callable[..., Plan]) -> None:
    table = yaml.safe_load(export(plan("dp=4,tp=2,pp=2,zero=1,recompute=full"), "nanotron"))
    assert table["parallelism"] == {
        "dp": 4,
        "tp": 2,
        "pp": 2,
        "pp_engine": "1f1b",
        "tp_mode": "REDUCE_SCATTER",
        "tp_linear_async_communication": True,
        "expert_parallel_size": 1,
        "context_parallel_size": 1,
        "recompute_layer": True,
    }
    assert table["tokens"]["batch_accumulation_per_replica"] == 16
    assert table["optimizer"]["zero_stage"] == 1
    assert table["optimizer"]["optimizer_factory"]["adam_eps"] == 1e-8
    assert table["model"]["model_config"]["num_hidden_layers"] == 32
    assert table["model"]["model_config"]["rms_norm_eps"] == 1e-5
    assert (
        yaml.safe_load(export(plan("dp=8,tp=1,pp=2,schedule=gpipe"), "nanotron"))["parallelism"]["pp_engine"] == "afab"
    )


@pytest.mark.parametrize(
    ("target", "layout", "model", "lost"),
    [
        ("megatron", "dp=4,tp=2,pp=2,schedule=zbv", "llama3-8b", "schedule=zbv"),
        ("megatron", "dp=4,tp=2,pp=2,zero=2", "llama3-8b", "zero=2"),
        ("deepspeed", "dp=8,tp=2", "llama3-8b", "sequence_parallel=true"),
        ("deepspeed", "dp=4,tp=1,pp=4,schedule=interleaved", "llama3-8b", "schedule=interleaved"),
        ("deepspeed", "dp=8,pp=2,zero=2", "llama3-8b", "zero=2"),
        ("deepspeed", "dp=4,tp=2,pp=2,sequence_parallel=false", "llama3-8b", "tp=2"),
        ("torchtitan", "dp=8,pp=2,zero=3", "qwen3-8b", "pp=2"),
        ("torchtitan", "dp=8,cp=2,cp_method=allgather,zero=3", "deepseek-v3", "cp=2"),
        ("torchtitan", "cp=16,cp_method=allgather", "llama3-8b", "zero=0"),
        ("nanotron", "dp=1,tp=16", "llama3-8b", "tp=16"),
        ("deepspeed", "dp=8,cp=2", "llama3-8b", "cp=2"),
        ("deepspeed", "dp=16,recompute=selective", "llama3-8b", "recompute=selective"),
        ("torchtitan", "dp=16,zero=3", "gpt-22b", "model=gpt-22b"),
        ("torchtitan", "dp=8,tp=2,zero=1", "llama3-8b", "zero=1"),
        ("torchtitan", "dp=8,tp=2", "llama3-8b", "zero=0"),
        ("torchtitan", "dp=8,pp=2,zero=3,schedule=zb1p", "llama3-8b", "schedule=zb1p"),
        ("nanotron", "dp=16,zero=3", "llama3-8b", "zero=3"),
        ("nanotron", "dp=8,pp=2,schedule=interleaved", "llama3-8b", "schedule=interleaved"),
        ("nanotron", "dp=8,cp=2", "llama3-8b", "cp=2"),
        ("deepspeed", "dp=16,zero=3,shard=8", "llama3-8b", "shard=8"),
        ("torchtitan", "dp=8,cp=2,zero=3", "llama3-8b", "cp_method=ring"),
        ("torchtitan", "dp=4,pp=4,zero=3,schedule=interleaved,micro_batch=8", "llama3-8b", "micro_batches=2"),
        ("torchtitan", "dp=4,pp=4,zero=3,schedule=dualpipev,micro_batch=4", "llama3-8b", "micro_batches=4"),
        ("nanotron", "dp=16", "gpt-22b", "model=gpt-22b"),
        ("nanotron", "dp=16,recompute=selective", "llama3-8b", "recompute=selective"),
        *(
            (target, "dp=16,recompute=full,recompute_layers=8", "llama3-8b", "recompute_layers=8")
            for target in ("megatron", "deepspeed", "torchtitan", "nanotron")
        ),
        *(
            (target, f"dp=2,pp=8,zero=1,{weights}", "llama3-8b", weights)
            for target in ("megatron", "deepspeed", "torchtitan", "nanotron")
            for weights in ("batch_weights=3:1", "shard_weights=3:1")
        ),
        *((target, "dp=8,pp=2,layers=20:12", "llama3-8b", "layers=20:12") for target in ("deepspeed", "nanotron")),
    ],
)
def test_what_a_target_cannot_say_is_named(
    plan: Callable[..., Plan], target: str, layout: str, model: str, lost: str
) -> None:
    with pytest.raises(UserError, match="has no key for") as error:
        export(plan(layout, model, sequence=2048), target)
    assert lost in str(error.value)


def test_what_a_target_does_in_its_own_way_stands_at_the_head(plan: Callable[..., Plan]) -> None:
    text = export(plan("dp=8,pp=8,ep=8,zero=3", "deepseek-v3", "h100x64"), "torchtitan")
    head = [line for line in text.splitlines() if line.startswith("# Otherwise there: ")]
    assert head == [
        "# Otherwise there: mixture.router_noise=0.0 (planned: 1.0)",
        "# Otherwise there: yarn=beyond 4096 tokens (planned: at any length)",
        "# Otherwise there: mixture.balance_coefficient=0.0 (planned: 0.1)",
        "# Otherwise there: model.norm_epsilon=1e-05 (planned: 1e-06)",
    ]
    assert "model.rope_scaling=8.0 (planned: None)" in export(plan("dp=16,zero=3"), "torchtitan")
    assert "Otherwise" not in export(plan("dp=16,zero=3", "llama3.1-8b"), "torchtitan")
    assert "mixture.router_noise=0.0" in export(plan("dp=16,ep=8,zero=1", "mixtral-8x7b"), "megatron")


def registered(text: str) -> list[str]:
    """What the head of a torchtitan file registers; it must be Python."""
    lines = [line[4:] for line in text.splitlines() if line.startswith("#   ")]
    ast.parse("\n".join(lines))
    return lines


def test_torchtitan_gets_the_flavor_that_is_the_model_whatever_it_is_called(plan: Callable[..., Plan]) -> None:
    for name, family, flavor in (
        ("llama3.3-70b", "llama3", "70B"),
        ("qwen3-235b-a22b", "qwen3", "235B-A22B"),
        ("deepseek-v2", "deepseek_v3", "236B"),
    ):
        text = export(plan("dp=16,zero=3", name), "torchtitan")
        assert tomllib.loads(text)["model"] == {"name": family, "flavor": flavor}
        assert not registered(text)
    assert "model.rope_theta=5000000.0 (planned: 1000000.0)" in export(
        plan("dp=16,zero=3", "qwen3-235b-a22b"), "torchtitan"
    )
    mine = replace(load_model("llama3.1-8b"), name="mine", initial_std=0.01)
    assert tomllib.loads(export(plan("dp=16,zero=3", mine), "torchtitan"))["model"]["flavor"] == "8B"
    other = replace(mine, rope_theta=1e6)  # another function: no flavor is that
    text = export(plan("dp=16,zero=3", other), "torchtitan")
    assert tomllib.loads(text)["model"]["flavor"] == "mine"
    assert "rope_theta=1000000.0" in "".join(registered(text))


@pytest.mark.parametrize(
    ("model", "family", "said"),
    [
        ("llama2-7b", "llama3", "multiple_of=11008"),
        ("mixtral-8x7b", "qwen3", "num_experts=8, num_shared_experts=0, top_k=2"),
        ("moe-1t", "deepseek_v3", "rope_factor=32.0"),
    ],
)
def test_torchtitan_is_told_how_to_register_a_model_it_has_not(
    plan: Callable[..., Plan], model: str, family: str, said: str
) -> None:
    text = export(plan("dp=16,zero=3", model), "torchtitan")
    table = tomllib.loads(text)
    assert table["model"] == {"name": family, "flavor": model}
    assert table["experimental"] == {"custom_import": "flavor"}
    assert said in "\n".join(registered(text))
    assert f"_args[{model!r}] = " in text


@pytest.mark.parametrize(
    ("target", "model", "reason"),
    [
        ("torchtitan", "gpt2", "lack positions=learned, norm=layernorm, activation=gelu, qkv_bias=true, output_bias="),
        ("torchtitan", "llama3.2-1b", "its models lack tie_embeddings=true"),
        ("nanotron", "gpt2", "it has but a dense llama"),
        ("nanotron", "moe-1t", "it has but a dense llama"),
    ],
)
def test_a_model_that_a_target_lacks_is_refused_whatever_the_layout(
    ask: Callable[..., Question], target: str, model: str, reason: str
) -> None:
    with pytest.raises(UserError, match="has no key for model=") as error:
        refuse_model(load_model(model), target)
    assert reason in str(error.value)
    assert "--fix" not in str(error.value)
    crowded = ask(model, "h100x8", engine=target, target=target, fixed=FIXED[target], memory_limit=2.0**20)
    with pytest.raises(UserError, match="has no key for model="):
        plans(crowded)


def test_gpt2_in_megatron(plan: Callable[..., Plan]) -> None:
    flags = flags_of(export(plan("dp=16,zero=1", "gpt2", sequence=1024), "megatron"))
    assert flags["--position-embedding-type"] == "learned_absolute"
    assert (flags["--normalization"], flags["--max-position-embeddings"]) == ("LayerNorm", "1024")
    without = ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--rotary-base")
    assert not any(flag in flags for flag in without)


def test_an_unknown_target_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(UserError, match="unknown target to=megatrn; use --to megatron"):
        export(plan("dp=16"), "megatrn")
    assert set(TARGETS) == {"megatron", "deepspeed", "torchtitan", "nanotron"}


@pytest.mark.parametrize(
    ("target", "model"),
    [
        *(("megatron", name) for name in ("llama3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b")),
        *(("deepspeed", name) for name in ("llama3-8b", "mixtral-8x7b")),
        *(("torchtitan", name) for name in ("llama3-8b", "llama3-70b")),
        *(("nanotron", name) for name in ("llama2-7b", "llama2-13b")),
    ],
)
def test_what_is_planned_for_an_engine_can_be_exported_to_it(
    ask: Callable[..., Question], target: str, model: str
) -> None:
    """Every plan of the answer, not the first alone."""
    question = ask(
        model, "h100x512", global_batch=512, sequence=2048, engine=target, target=target, fixed=FIXED[target]
    )
    found = plans(question, top=4)
    assert found
    for made in found:
        assert export(made, target)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "nanotron"])
@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("tiny-gemma3", "model.unit_norms=true"),
        ("tiny-olmo3", "model.qk_norm_whole"),
        ("tiny-gpt-oss", "mixture.biases"),
    ],
)
def test_parts_that_no_writer_has_words_for_are_refused(
    plan: Callable[..., Plan], model: str, part: str, target: str
) -> None:
    with pytest.raises(UserError, match=f"{target} has no key for ") as error:
        export(plan("dp=16", model), target)
    assert part in str(error.value) and "model.windows=(6, " in str(error.value)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("dropout=0.1", r"training\.dropout=0\.1 .* megatron; use dropout=0 and add --hidden-dropout 0\.1 to it"),
        ("z_loss=0.1", r"training\.z_loss=0\.1 .* use z_loss=0"),
        ("batch_ramp=8x2", r"training\.batch_ramp=8x2 .* use batch_ramp=none"),
    ],
)
def test_what_a_plan_does_not_know_is_refused_by_name(setting: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        refuse_recipe(build_run({"model": "tiny-llama"}, [f"training.{setting}"]), "megatron")
    refuse_recipe(build_run({"model": "tiny-llama"}), "megatron")
