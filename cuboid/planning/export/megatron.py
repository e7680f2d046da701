"""A plan as a launch script for Megatron-LM (core 0.14 and later, `pretrain_gpt.py`).

https://github.com/NVIDIA/Megatron-LM
"""

from cuboid.planning.export.engines import Lost, Note, noted, router_notes
from cuboid.planning.plan import Plan
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.model import ModelSpec

TARGET = "Megatron-LM core 0.14"
Flags = list[str]


def export(plan: Plan) -> str:
    """The script; flags one to a line."""
    _check(plan)
    layout, cluster, run = plan.layout, plan.question.cluster, plan.run
    flags = [*_parallel(plan), *_batch(plan), *_model(plan), *_mixture(plan), *_training(plan)]
    per_node = min(cluster.accelerators_per_node, layout.world_size)
    fully_sharded = layout.zero >= 2
    order = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS  # fully sharded data parallelism needs several queues"
        if fully_sharded
        else "export CUDA_DEVICE_MAX_CONNECTIONS=1  # keeps communication kernels in the order of their launch"
    )
    lines = [
        "#!/usr/bin/env bash",
        f"# {run.model.name} on {cluster.name}: {layout}",
        f"# For {TARGET}; predicted: {plan.seconds:.4g} s a step, {plan.memory_fraction:.0%} of memory.",
        f"# Megatron infers dp={layout.dp} and {plan.micro_batches} micro-batches per step from the sizes below.",
        *noted(notes(plan)).splitlines(),
        "set -euo pipefail",
        order,
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        f"torchrun --nproc-per-node {per_node} --nnodes {layout.world_size // per_node} "
        '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port 29500 \\',
        "  pretrain_gpt.py \\",
        *(f"  {flag} \\" for flag in flags),
        '  "$@"',
    ]
    return "\n".join(lines) + "\n"


def notes(plan: Plan) -> list[Note]:
    """What Megatron does in its own way."""
    return router_notes(plan.question.model)


def check_model(model: ModelSpec, lost: Lost) -> None:
    """Notes what its GPT lacks."""
    yarn = model.yarn
    if yarn is not None:
        usual = model.latent is not None and (yarn.original_positions, yarn.beta_fast, yarn.beta_slow) == (4096, 32, 1)
        known = usual and not yarn.attention_factor and yarn.truncate
        lost.unless(known, "model.yarn", yarn.factor, "it has YaRN for latent attention, stretched from 4,096 tokens")
    mixture = model.mixture
    if mixture is not None:
        plain = mixture.normalized or mixture.scoring == "softmax"
        lost.unless(plain, "mixture.normalized", False, "with scoring=sigmoid use normalized=true")
        softmax = mixture.scoring == "softmax" and mixture.normalized and mixture.groups > 1
        lost.unless(not softmax, "mixture.groups", mixture.groups, "with normalized softmax scores use groups=1")


def _check(plan: Plan) -> None:
    layout = plan.layout
    lost = Lost(TARGET)
    lost.unless_equal(layout)
    known = layout.schedule in ("1f1b", "interleaved")
    lost.unless(known, "schedule", layout.schedule, "use schedule=1f1b or schedule=interleaved")
    lost.unless(layout.zero < 2 or layout.pp == 1, "zero", layout.zero, "with pp > 1 use zero=0 or zero=1")
    even = layout.schedule != "interleaved" or plan.micro_batches % layout.pp == 0
    lost.unless(layout.zero == 1 or not layout.offload, "offload", True, "use zero=1 or offload=false")
    lost.unless(even, "micro_batches", plan.micro_batches, f"interleaved needs a multiple of pp={layout.pp}")
    predicts = plan.question.model.prediction_layers > 0
    lost.unless(layout.cp == 1 or not predicts, "cp", layout.cp, "with model.prediction_layers use cp=1")
    some = layout.recompute_layers
    lost.unless(not some, "recompute_layers", some, "use recompute_layers=0")
    check_model(plan.question.model, lost)
    lost.refuse()


def _parallel(plan: Plan) -> Flags:
    layout = plan.layout
    flags = [
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
        f"--context-parallel-size {layout.cp}",
    ]
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.cp > 1:
        kinds = {"ring": "p2p", "ulysses": "a2a", "allgather": "all_gather", "hybrid": "a2a+p2p"}
        flags.append(f"--cp-comm-type {kinds[layout.cp_method]}")
    if layout.cp_method == "hybrid":
        flags.append(f"--hierarchical-context-parallel-sizes {layout.cp_inner} {layout.cp // layout.cp_inner}")
    predicted = plan.question.model.prediction_layers
    if len(set(plan.layers)) > 1:
        flags.append(f'--pipeline-model-parallel-layout "{stage_layout(plan.layers, predicted)}"')
    elif layout.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.vpp}")
    if layout.zero == 1:
        flags += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    elif layout.zero >= 2:
        strategy = "optim_grads" if layout.zero == 2 else "optim_grads_params"
        flags += [
            "--use-distributed-optimizer",
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {strategy}",
            "--no-gradient-accumulation-fusion",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
            "--ckpt-format fsdp_dtensor",
        ]
    if layout.zero and layout.shard_size < layout.dp:
        flags.append(f"--num-distributed-optimizer-instances {layout.dp // layout.shard_size}")
    if layout.offload:
        flags += ["--optimizer-cpu-offload", "--optimizer-offload-fraction 1.0", "--overlap-cpu-optimizer-d2h-h2d"]
        flags.append("--use-precision-aware-optimizer")
    if layout.recompute == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif layout.recompute == "selective":
        flags += ["--recompute-granularity selective", "--recompute-modules core_attn"]
    return flags


def stage_layout(layers: tuple[int, ...], predicted: int = 0) -> str:
    """Megatron's own notation: E the embedding, t a layer, m a prediction layer, L the loss, | the end of a stage."""
    stages = [f"t*{count}" for count in layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{'m' * predicted}L"
    return "|".join(stages)


def _batch(plan: Plan) -> Flags:
    return [
        f"--micro-batch-size {plan.layout.micro_batch}",
        f"--global-batch-size {plan.question.global_batch}",
        f"--seq-length {plan.question.sequence}",
    ]


def _model(plan: Plan) -> Flags:
    model = plan.question.model
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--num-attention-heads {model.heads}",
        f"--ffn-hidden-size {model.ffn}",
        f"--max-position-embeddings {max(model.max_positions, plan.question.sequence)}",
        f"--normalization {'RMSNorm' if model.norm == 'rmsnorm' else 'LayerNorm'}",
        f"--norm-epsilon {model.norm_epsilon!r}",
        f"--init-method-std {model.initial_std!r}",
        "--tokenizer-type NullTokenizer",
        f"--vocab-size {model.vocab}",
        "--attention-dropout 0.0",
        "--hidden-dropout 0.0",
    ]
    if model.latent is None:
        flags.append(f"--kv-channels {model.head_dim}")
        if model.kv_heads != model.heads:
            flags += ["--group-query-attention", f"--num-query-groups {model.kv_heads}"]
    else:
        latent = model.latent
        flags += ["--multi-latent-attention", f"--kv-lora-rank {latent.kv_rank}", f"--v-head-dim {latent.v_dim}"]
        flags += [f"--q-lora-rank {latent.q_rank}"] if latent.q_rank else []
        flags += [f"--qk-head-dim {latent.qk_nope_dim}", f"--qk-pos-emb-head-dim {latent.qk_rope_dim}"]
        flags.append("--qk-layernorm")  # of the latents: without it they have no norms
        flags += _yarn(model)
    if model.positions == "rope":
        flags += ["--position-embedding-type rope", f"--rotary-base {int(model.rope_theta)}"]
        if model.rope_scaling:
            flags += ["--use-rope-scaling", f"--rope-scaling-factor {model.rope_scaling.factor!r}"]
    else:
        flags.append("--position-embedding-type learned_absolute")
    if model.activation == "swiglu":
        flags.append("--swiglu")
    if not (model.output_bias or model.mlp_bias):
        flags.append("--disable-bias-linear")
        flags += ["--add-qkv-bias"] if model.qkv_bias else []
    if model.qk_norm and model.latent is None:
        flags.append("--qk-layernorm")
    if not model.tie_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if model.prediction_layers:
        flags.append(f"--mtp-num-layers {model.prediction_layers}")
        flags.append(f"--mtp-loss-scaling-factor {plan.run.training.prediction_loss!r}")
    return flags


def _yarn(model: ModelSpec) -> Flags:
    """Latent attention has YaRN by default, with a factor of 40."""
    if model.yarn is None:
        return ["--rope-type rope", "--rotary-scaling-factor 1.0"]
    yarn = model.yarn
    scale = [f"--mscale {yarn.mscale!r}", f"--mscale-all-dim {yarn.mscale_all_dim!r}"]
    return ["--rope-type yarn", f"--rotary-scaling-factor {yarn.factor!r}", *scale]


def _mixture(plan: Plan) -> Flags:
    mixture, layout = plan.question.model.mixture, plan.layout
    if mixture is None:
        return []
    dense = mixture.first_dense_layers
    flags = [
        f"--num-experts {mixture.experts}",
        f"--moe-router-topk {mixture.top_k}",
        f"--moe-ffn-hidden-size {mixture.expert_ffn}",
        f"--expert-model-parallel-size {layout.ep}",
        "--expert-tensor-parallel-size 1",
        "--moe-token-dispatcher-type alltoall",
        "--moe-grouped-gemm",
    ]
    if dense:
        flags.append(f'--moe-layer-freq "([0]*{dense}+[1]*{plan.question.model.layers - dense})"')
    if mixture.shared_ffn:
        flags.append(f"--moe-shared-expert-intermediate-size {mixture.shared_ffn}")
    return flags + _balancing(mixture)


def _balancing(mixture: MixtureSpec) -> Flags:
    """Its coefficients mean what ours mean; `global_aux_loss` counts assignments of this step as far as it has come."""
    kind = {"sequence": "seq_aux_loss", "global_batch": "global_aux_loss"}[mixture.balance_over]
    flags = [
        f"--moe-router-load-balancing-type {kind if mixture.balance_coefficient else 'none'}",
        f"--moe-router-score-function {mixture.scoring}",
        "--moe-router-dtype fp32",
    ]
    if mixture.scoring == "softmax" and not mixture.normalized:
        flags.append("--moe-router-pre-softmax")  # scores of all experts, not of the chosen alone
    if mixture.groups > 1:
        flags += [f"--moe-router-num-groups {mixture.groups}", f"--moe-router-group-topk {mixture.top_groups}"]
    if mixture.scaling != 1:
        flags.append(f"--moe-router-topk-scaling-factor {mixture.scaling!r}")
    if mixture.balance_coefficient:
        flags.append(f"--moe-aux-loss-coeff {mixture.balance_coefficient!r}")
    if mixture.z_coefficient:
        flags.append(f"--moe-z-loss-coeff {mixture.z_coefficient!r}")
    if mixture.bias_rate:
        flags += ["--moe-router-enable-expert-bias", f"--moe-router-bias-update-rate {mixture.bias_rate!r}"]
    return flags


FP8 = {
    "tensor": ("--fp8-format hybrid", "--fp8-recipe tensorwise"),
    "block": ("--fp8-format e4m3", "--fp8-recipe blockwise"),
}


def _training(plan: Plan) -> Flags:
    run = plan.run
    rate, optimizer, training = run.learning_rate, run.optimizer, run.training
    flags = [
        f"--train-iters {training.steps}",
        f"--seed {max(training.seed, 1)}",
        f"--clip-grad {training.gradient_clip!r}",
        f"--lr {rate.peak!r}",
        f"--min-lr {rate.peak * rate.minimum_ratio!r}",
        f"--lr-decay-style {'WSD' if rate.schedule == 'wsd' else rate.schedule}",
        f"--lr-warmup-iters {rate.warmup_steps}",
        f"--weight-decay {optimizer.weight_decay!r}",
        f"--adam-beta1 {optimizer.beta1!r}",
        f"--adam-beta2 {optimizer.beta2!r}",
        f"--adam-eps {optimizer.epsilon!r}",
    ]
    if rate.schedule == "wsd":
        flags.append(f"--lr-wsd-decay-iters {rate.decay_steps or training.steps // 5}")
    precision = plan.question.precision
    if precision == "fp8":
        flags += ["--bf16", *FP8[plan.question.fp8_scaling]]
    elif precision != "float32":
        flags.append(f"--{precision}")
    return flags
