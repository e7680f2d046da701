"""DeepSpeed configs: what each key becomes, the arithmetic of the batch, and refusals by full name."""

from typing import Any

import pytest

from cuboid.errors import UserError
from cuboid.spec.deepspeed import KEYS, Only, notes_from_deepspeed, run_table_from_deepspeed
from cuboid.spec.run import Run, build_run
from cuboid.spec.training import LearningRateSpec

FULL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.98], "weight_decay": 0.2}},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
    "pipeline": {"stages": 2, "pipe_partitioned": True, "grad_partitioned": True},
    "tensor_parallel": {"autotp_size": 2},
    "activation_checkpointing": {"partition_activations": True},
}
BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}


def imported(config: dict[str, Any], world_size: int | None = None) -> Run:
    return build_run({"model": "tiny-llama", **run_table_from_deepspeed(config, world_size)})


def refusal(config: dict[str, Any], world_size: int | None = None) -> str:
    with pytest.raises(UserError) as caught:
        imported(config, world_size)
    return str(caught.value)


def test_every_section_becomes_part_of_the_run() -> None:
    run = imported(FULL)
    assert str(run.layout) == "dp=4,tp=2,pp=2,zero=1,micro_batch=2,recompute=full"
    assert (run.training.global_batch, run.micro_batches, run.training.precision) == (64, 8, "bf16")
    assert (run.training.gradient_clip, run.output.log_every) == (0.5, 10)
    assert (run.optimizer.beta2, run.optimizer.weight_decay, run.optimizer.epsilon) == (0.98, 0.2, 1e-8)
    assert (run.learning_rate.peak, run.learning_rate.schedule) == (1e-4, "constant")
    assert imported(FULL, 16) == run


def test_silence_means_what_it_means_to_deepspeed() -> None:
    run = imported({"train_batch_size": 16}, 4)
    assert (str(run.layout), run.micro_batches) == ("dp=4,tp=1,pp=1,micro_batch=4", 1)
    assert (run.training.gradient_clip, run.training.precision) == (0.0, "float32")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (32, 2, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (32, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, (32, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 8}, (32, 8, 1)),
        ({"train_batch_size": 32}, (32, 8, 1)),
    ],
)
def test_two_batch_sizes_tell_the_third(sizes: dict[str, Any], expected: tuple[int, int, int]) -> None:
    run = imported(sizes, world_size=4)
    assert (run.training.global_batch, run.layout.micro_batch, run.micro_batches) == expected


def test_the_other_spellings_of_degrees() -> None:
    spelled = {"pipeline": {"pipe_degree": 2, "interleave_degree": 2}, "tensor_parallel": {"tp_degree": 8}}
    run = imported({"train_batch_size": 32, "zero_optimization": {"stage": 3}, **spelled}, 32)
    assert str(run.layout) == "dp=2,tp=8,pp=2,zero=3,schedule=interleaved,micro_batch=16"


def test_the_optimizer_is_offloaded_where_it_is_asked_for() -> None:
    for device, offload in (("cpu", True), ("none", False)):
        zero = {"stage": 3, "offload_optimizer": {"device": device, "pin_memory": True}}
        assert imported({**BATCH, "zero_optimization": zero}, 4).layout.offload == offload


def test_hybrid_sharding_and_recomputation() -> None:
    zero = {"stage": 3, "mics_shard_size": 2}
    assert imported({**BATCH, "zero_optimization": zero}, 4).layout.shard == 2
    assert imported({**BATCH, "zero_optimization": {"stage": 3, "mics_shard_size": -1}}, 4).layout.shard == 0
    assert imported({**BATCH, "pipeline": {"activation_checkpoint_interval": 1}}, 4).layout.recompute == "full"
    assert imported({**BATCH, "pipeline": {"activation_checkpoint_interval": 0}}, 4).layout.recompute == "none"
    ulysses = imported({**BATCH, "sequence_parallel_size": 2}, 4).layout
    assert (ulysses.cp, ulysses.cp_method, ulysses.dp) == (2, "ulysses", 2)
    empty = {"gradient_clipping": None, "zero_optimization": {"offload_param": None}}
    assert imported({**BATCH, **empty}, 4).layout.dp == 4


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"torch_autocast": {"enabled": True}}, ["torch_autocast.enabled=true (use torch_autocast.enabled=false)"]),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            ["(use bf16.bf16_master_weights_and_grads=false)", "(use bf16.bf16_optimizer_states=false)"],
        ),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, ["zenflow (every gradient is used in its own"]),
        ({"optimizer": {"params": {"adam_w_mode": False}}}, ["adam_w_mode=false (use optimizer.params.adam_w_mode=t"]),
        (
            {"zero_optimisation": {"stage": 1}},
            ["zero_optimisation.stage=1 (unknown; zero_optimization.stage is known)"],
        ),
        ({"scheduler": {"type": "OneCycle"}}, ['scheduler.type="OneCycle" (use scheduler.type="WarmupLR"']),
        (
            {"optimizer": {"type": "Lamb", "params": {"max_coeff": 0.3}}},
            ['honoured: optimizer.type="Lamb" (use optimizer.type="AdamW" or optimizer.type="Adam"); change'],
        ),
        ({"zero_optimization": {"overlap_comm": [1]}}, ["overlap_comm=[1] (use zero_optimization.overlap_comm=true)"]),
        ({"zero_optimization": {"wow": 1}, "fp8": {}}, ["zero_optimization.wow=1 (unknown"]),
        (
            {"curriculum_learning": {"enabled": True, "min_difficulty": 8}},
            ["curriculum_learning (sequences have one l"],
        ),
        ({"compression_training": {"layer_reduction": {"enabled": True}}}, ["compression_training (nothing is pruned"]),
        (
            {"sparse_attention": {"mode": "fixed"}, "amp": {"enabled": True}},
            ["amp (use fp16.enabled=true), sparse_att"],
        ),
    ],
)
def test_keys_that_cannot_be_honoured_are_all_named(changes: dict[str, Any], parts: list[str]) -> None:
    sentence = refusal({**BATCH, **changes}, 4)
    assert sentence.startswith("DeepSpeed keys that cannot be honoured: ")
    assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize(
    ("changes", "world_size", "sentence"),
    [
        (
            {"train_batch_size": 30},
            4,
            "train_batch_size=30 does not divide by 4; use train_batch_size=28 or train_batch_size=32",
        ),
        (
            {"train_batch_size": 32},
            4,
            "train_batch_size=32 is not train_micro_batch_size_per_gpu=1 × gradient_accumulation_steps=4 × dp=4; "
            "use train_batch_size=16",
        ),
        ({"train_batch_size": 6}, None, "train_batch_size=6 does not divide by train_micro_batch_size_per_gpu=1 × "),
        ({}, None, "world_size is missing and the three batch sizes are not all there to tell it"),
        (
            {"pipeline": {"stages": 3}},
            4,
            "world_size=4 does not divide by tensor × pipeline × sequence = 3; use world_size=3 or world_size=6",
        ),
        ({"pipeline": {"stages": 0}}, 4, "pipeline.stages=0 is not positive"),
        (
            {"pipeline": {"stages": 2, "pipe_degree": 2}},
            4,
            "pipeline.stages=2 and pipeline.pipe_degree=2 say the same thing",
        ),
        ({"train_batch_size": "all"}, 4, 'train_batch_size="all" is a string; it must be an integer'),
        ({"zero_optimization": {"stage": 4}}, 4, "zero=4 is out of range; use zero=3"),
        ({"optimizer": {"params": {"betas": 0.9}}}, 4, "optimizer.params.betas=0.9 is not a pair"),
        ({"gradient_clipping": -1}, 4, "training.gradient_clip=-1.0 is too small"),
        ({"tensor_parallel": {"autotp_size": 3}}, 3, "tp=3 does not divide heads=8; use tp=2 or tp=4"),
    ],
)
def test_values_that_do_not_fit_are_refused_in_one_sentence(
    changes: dict[str, Any], world_size: int | None, sentence: str
) -> None:
    assert refusal({**BATCH, **changes}, world_size).startswith(sentence)


def test_empty_sections_are_known_or_named() -> None:
    assert imported({**BATCH, "pipeline": {}}, 4) == imported(BATCH, 4)
    assert "bf17={} (unknown" in refusal({**BATCH, "bf17": {}}, 4)


def test_keys_that_deepspeed_does_not_know_are_noted_unless_they_look_like_one() -> None:
    config = {**BATCH, "_comment": "for eight", "log": {"every": 5}}
    assert imported(config, 4) == imported(BATCH, 4)
    assert notes_from_deepspeed(config) == ["_comment, log.every: no keys of DeepSpeed; not used"]


OFFLOADED: dict[str, Any] = {
    **BATCH,
    "steps_per_print": 2e3,
    "gradient_accumulation_steps": "4",
    "prescale_gradients": True,
    "bfloat16": {"enabled": "true"},
    "compile": {"disable": False, "backend": "inductor"},
    "curriculum_learning": {"enabled": False, "min_difficulty": 8},
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "max_grad_norm": 0.7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-6, "warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "max_live_parameters": 0,
        "offload_optimizer": {"device": "nvme", "ratio": 0.5},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}
"""Keys of many public configs that Cuboid does in its own way."""


def test_what_is_done_otherwise_is_noted_in_words() -> None:
    run = imported(OFFLOADED, 4)
    assert (run.layout.zero, run.layout.offload, run.training.precision) == (3, True, "bf16")
    assert (run.training.gradient_clip, run.output.log_every, run.learning_rate.warmup_steps) == (0.7, 2000, 10)
    notes = notes_from_deepspeed(OFFLOADED)
    for start in (
        "prescale_gradients=true: gradients are divided after",
        "zero_optimization.overlap_comm=false: communication overlaps",
        'zero_optimization.offload_optimizer.device="nvme": the optimizer\'s state goes to CPU memory',
        "zero_optimization.offload_optimizer.ratio=0.5: all of",
        'zero_optimization.offload_param.device="cpu": parameters stay',
        "scheduler.params.warmup_min_lr=1e-06: the learning rate rises from 0",
        "scheduler.params.warmup_type: the learning rate rises linearly; DeepSpeed's default is log",
    ):
        assert any(note.startswith(start) for note in notes), (start, notes)
    for key in ("compile.backend", "curriculum_learning.min_difficulty", "zero_optimization.max_live_parameters"):
        assert key in notes[0]


def test_old_spellings() -> None:
    assert imported({**BATCH, "zero_optimization": True}, 4).layout.zero == 1
    assert imported({**BATCH, "zero_optimization": {"stage": 2, "cpu_offload": True}}, 4).layout.offload


def test_no_batch_size_at_all() -> None:
    assert refusal({}, 4) == "train_micro_batch_size_per_gpu is missing and train_batch_size too; give one of them"


def test_every_key_at_its_only_value_is_accepted() -> None:
    for key, kind in KEYS.items():
        if isinstance(kind, Only):
            config: Any = kind.values[0]
            for part in reversed(key.split(".")):
                config = {part: config}
            imported({**BATCH, **config}, 4)


def test_fp16_keeps_its_loss_scale() -> None:
    spelled = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}
    training = imported({**BATCH, "fp16": spelled}, 4).training
    assert (training.precision, training.loss_scale, training.loss_scale_steps) == ("fp16", 4096.0, 500)
    fixed = imported({**BATCH, "fp16": {"enabled": True, "loss_scale": 128}}, 4).training
    assert (fixed.loss_scale, fixed.loss_scale_steps) == (128.0, 10**9)
    assert notes_from_deepspeed({"fp16": {"enabled": True, "loss_scale": 128}})[0].startswith("fp16.loss_scale=128: ")
    with pytest.raises(UserError, match="two precisions; use one of them"):
        imported({**BATCH, "fp16": spelled, "bf16": {"enabled": True}}, 4)


TRAINER: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "contiguous_gradients": True, "reduce_bucket_size": "auto"},
}
"""As the Hugging Face trainer's own example has it."""


def test_what_a_trainer_would_fill_in_is_noted() -> None:
    run = imported(TRAINER, 8)
    assert (str(run.layout), run.training.global_batch, run.training.precision) == ("dp=8,tp=1,pp=1,zero=3", 8, "bf16")
    ignored, filled = notes_from_deepspeed(TRAINER)
    for key in ("fp16.hysteresis", "zero_optimization.contiguous_gradients", "zero_optimization.reduce_bucket_size"):
        assert key in ignored
    assert "train_micro_batch_size_per_gpu=1" in filled
    assert "optimizer.params.lr as by default" in filled
    assert notes_from_deepspeed(FULL) == []


def test_schedulers_of_the_learning_rate() -> None:
    def rate(kind: str, **more: object) -> LearningRateSpec:
        scheduler = {"type": kind, "params": {"warmup_num_steps": 10, "warmup_max_lr": 2e-5, **more}}
        return imported({**BATCH, "scheduler": scheduler}, 4).learning_rate

    assert rate("WarmupLR") == LearningRateSpec(peak=2e-5, schedule="constant", warmup_steps=10)
    cosine = LearningRateSpec(peak=2e-5, schedule="cosine", warmup_steps=10, minimum_ratio=0.0001)  # its default
    assert rate("WarmupCosineLR", total_num_steps=50) == cosine
    assert rate("WarmupCosineLR", total_num_steps=50, cos_min_ratio=0.1).minimum_ratio == 0.1
    falls = LearningRateSpec(peak=2e-5, schedule="wsd", warmup_steps=10, decay_steps=40, minimum_ratio=0.0)
    assert rate("WarmupDecayLR", total_num_steps=50) == falls


def test_a_config_of_far_too_many_keys() -> None:
    with pytest.raises(UserError, match="a config of more than 5,000 keys is none of DeepSpeed's"):
        run_table_from_deepspeed({f"key{number}": number for number in range(100_000)}, None)
