"""What a layout needs of a model, a batch, a sequence and a number of ranks; each refusal is one sentence."""

from math import gcd

from cuboid.errors import UserError, either, nearest_numbers, use
from cuboid.spec.layout import Layout, format_weights, require_positive
from cuboid.spec.model import ModelSpec
from cuboid.spec.partition import longest_stage
from cuboid.spec.plugin import PythonModelSpec


def check(
    layout: Layout,
    model: ModelSpec,
    *,
    global_batch: int,
    sequence: int,
    world_size: int | None = None,
    section: str = "",
) -> None:
    """Every rule that needs the model, the batch or the number of ranks; returns when the layout works for them.

    `section`: what stands before the names of batch and sequence where the user writes them; `training.` in a run."""
    require_positive(f"{section}global_batch", global_batch)
    require_positive(f"{section}sequence", sequence)
    if world_size is not None:
        check_world_size(layout, world_size)
    check_model(layout, model)
    _check_batch(layout, global_batch, f"{section}global_batch")
    _check_sequence(layout, model, sequence, f"{section}sequence")
    _check_recompute(layout, model, sequence)


def check_model(layout: Layout, model: ModelSpec) -> None:
    """The rules of `check` that need the model only."""
    if isinstance(model, PythonModelSpec):
        _check_python(layout, model)
        return
    _check_tensor(layout, model)
    _check_heads(layout, model)
    _check_stages(layout, model)
    _check_experts(layout, model)


def _check_python(layout: Layout, model: PythonModelSpec) -> None:
    if layout.cp > 1:
        raise UserError(f"cp={layout.cp} is not for a model of one's own; use cp=1")
    if layout.sequence_parallel:
        raise UserError("sequence_parallel=true is not for a model of one's own; use sequence_parallel=false")
    _check_stages(layout, model)
    if layout.tp > 1:
        model.built.check_tensor_parallel(layout.tp)
    if layout.ep > 1 and not model.is_routed:
        raise UserError(f"ep={layout.ep} needs parameters declared as EXPERT and {model.name} has none; use ep=1")
    for name, experts in model.built.experts.items():
        _check_divides(layout, experts, f"the first dimension of {name}, ")


def check_world_size(layout: Layout, world_size: int) -> None:
    """The degrees must multiply to the number of ranks."""
    if layout.world_size == world_size:
        return
    degrees = " × ".join(
        f"{name}={getattr(layout, name)}" for name in ("dp", "cp", "tp", "pp") if getattr(layout, name) > 1
    )
    others = layout.world_size // layout.dp
    works = f"use dp={world_size // others} or " if world_size % others == 0 else ""
    needed = layout.world_size
    start = f"start {needed} rank{'s' if needed > 1 else ''}"
    raise UserError(f"{degrees or 'dp=1'} needs world_size={needed}, not {world_size}; {works}{start}")


def _check_tensor(layout: Layout, model: ModelSpec) -> None:
    split = {"heads": model.heads}
    if not model.has_experts(0):
        split["ffn"] = model.ffn
    if model.mixture is not None and model.mixture.shared_ffn:
        split["mixture.shared_ffn"] = model.mixture.shared_ffn
    common = gcd(*split.values())
    for name, size in split.items():
        if size % layout.tp:
            near = nearest_numbers(layout.tp, lambda number: common % number == 0, 1, common)
            raise UserError(f"tp={layout.tp} does not divide {name}={size}; {use('tp', near)}")


def _check_heads(layout: Layout, model: ModelSpec) -> None:
    """Ranks that trade heads need a head each. Key-value heads may be fewer: they are repeated."""
    heads = model.heads // layout.tp
    if heads % layout.cp_inner == 0:
        return
    name = "cp" if layout.cp_method == "ulysses" else "cp_inner"
    near = nearest_numbers(layout.cp_inner, lambda number: heads % number == 0, 1, heads)
    values = either([f"{name}={number}" for number in near if number > 1] + ["cp_method=ring"])
    each = f"heads={model.heads}" + (f" / tp={layout.tp}" if layout.tp > 1 else "")
    raise UserError(
        f"{name}={layout.cp_inner} does not divide {each}, which cp_method={layout.cp_method} shards; use {values}"
    )


def _check_stages(layout: Layout, model: ModelSpec) -> None:
    if layout.stages <= model.layers:
        if layout.layers and sum(layout.layers) != model.layers:
            raise UserError(
                f"layers={format_weights(layout.layers)} are {sum(layout.layers)} layers and {model.name} has "
                f"{model.layers}; use {layout.stages} numbers with that sum"
            )
        return
    fewer = model.layers // layout.vpp
    virtual = f" × vpp={layout.vpp}" if layout.vpp > 1 else ""
    works = use("pp", [fewer]) if fewer else "use schedule=1f1b"
    raise UserError(f"pp={layout.pp}{virtual} makes more stages than layers={model.layers}; {works}")


def _check_batch(layout: Layout, global_batch: int, name: str) -> None:
    unit = layout.batch_unit
    if global_batch % unit:
        near = nearest_numbers(global_batch, lambda number: number % unit == 0, unit, global_batch + unit)
        raise UserError(f"{name}={global_batch} does not divide by {batch_divisor(layout)}; {use(name, near)}")


def batch_divisor(layout: Layout) -> str:
    """What a global batch must divide by, in words."""
    parts = f"dp={layout.dp}"
    if layout.batch_weights:
        parts = f"the {layout.batch_parts} parts of batch_weights={format_weights(layout.batch_weights)}"
    return f"{parts} × micro_batch={layout.micro_batch}"


def _check_sequence(layout: Layout, model: ModelSpec, sequence: int, name: str) -> None:
    if model.positions == "learned" and sequence > model.max_positions:
        raise UserError(
            f"{name}={sequence} is longer than max_positions={model.max_positions} of {model.name}; "
            f"{use(name, [model.max_positions])} or less"
        )
    chunks = 2 * layout.cp if layout.cp > 1 else 1
    if sequence % chunks:
        near = nearest_numbers(sequence, lambda number: number % chunks == 0, chunks, sequence + chunks)
        raise UserError(
            f"{name}={sequence} does not divide into the 2 × cp = {chunks} chunks that give every rank equal work; "
            f"{use(name, near)}"
        )
    tokens = layout.micro_batch * sequence // layout.cp
    if (layout.sequence_parallel or model.is_routed) and tokens % layout.tp:

        def works(number: int) -> bool:
            return number % chunks == 0 and layout.micro_batch * number // layout.cp % layout.tp == 0

        near = nearest_numbers(sequence, works, 1, sequence + chunks * layout.tp)
        dense = not model.is_routed
        values = either([f"{name}={number}" for number in near] + ["sequence_parallel=false"] * dense)
        raise UserError(
            f"micro_batch={layout.micro_batch} × {name}={sequence} tokens do not divide by tp={layout.tp} "
            f"{'under sequence_parallel' if dense else 'to be routed'}; use {values}"
        )


def _check_recompute(layout: Layout, model: ModelSpec, sequence: int) -> None:
    """All layers have one spelling, 0."""
    if not layout.recompute_layers:
        return
    most = longest_stage(model, layout.stages, sequence, layout.layers)
    if layout.recompute_layers >= most:
        fewer = f"use recompute_layers={most - 1} or less, or 0 for all" if most > 1 else "use recompute_layers=0"
        raise UserError(
            f"recompute_layers={layout.recompute_layers} covers every layer of the longest stage, which has {most}; "
            f"{fewer}"
        )


FP8_MULTIPLE = 16


def check_fp8(layout: Layout, model: ModelSpec, sequence: int, section: str = "", experts: bool = False) -> None:
    """Both dimensions of each linear in a block, as a rank holds it, and its tokens must divide by 16. `section`: as in
    `check`. `experts`: those too."""
    tokens = layout.micro_batch * sequence // layout.cp
    wanted = FP8_MULTIPLE * layout.cp
    if tokens % FP8_MULTIPLE:
        near = nearest_numbers(sequence, lambda number: number % wanted == 0, wanted, sequence + wanted)
        raise UserError(
            f"{section}precision=fp8 multiplies by {FP8_MULTIPLE} tokens, and micro_batch={layout.micro_batch} × "
            f"{section}sequence={sequence}{f' / cp={layout.cp}' if layout.cp > 1 else ''} = {tokens} does not divide "
            f"by it; {use(f'{section}sequence', near)}"
        )
    widths = _linear_widths(layout, model)
    if experts:
        if model.mixture is None:
            raise UserError(f"{section}fp8_experts=true needs experts and {model.name} has none; use fp8_experts=false")
        widths["mixture.expert_ffn"] = model.mixture.expert_ffn
    for name, size in widths.items():
        if size % FP8_MULTIPLE:
            smaller = f"a smaller tp than {layout.tp} or " if layout.tp > 1 else ""
            raise UserError(
                f"{section}precision=fp8 needs {name}={size} to divide by {FP8_MULTIPLE}; "
                f"use {smaller}{section}precision=bf16"
            )


def _linear_widths(layout: Layout, model: ModelSpec) -> dict[str, int]:
    each = f" / tp={layout.tp}" if layout.tp > 1 else ""
    widths = {"hidden": model.hidden}
    latent = model.latent
    if latent is None:
        widths["heads × head_dim" + each] = model.heads * model.head_dim // layout.tp
        parts = gcd(model.kv_heads, layout.tp)
        widths["kv_heads × head_dim" + each] = model.kv_heads * model.head_dim // parts
    else:
        heads = model.heads // layout.tp
        widths["q_rank"] = latent.q_rank
        widths["kv_rank"] = latent.kv_rank
        widths["kv_rank + qk_rope_dim"] = latent.kv_rank + latent.qk_rope_dim
        widths[f"heads{each} × (qk_nope_dim + qk_rope_dim)"] = heads * (latent.qk_nope_dim + latent.qk_rope_dim)
        widths[f"heads{each} × (qk_nope_dim + v_dim)"] = heads * (latent.qk_nope_dim + latent.v_dim)
        widths[f"heads{each} × v_dim"] = heads * latent.v_dim
    if any(not model.has_experts(layer) for layer in range(model.layers)):
        widths["ffn" + each] = model.ffn // layout.tp
    if model.mixture is not None and model.mixture.shared_ffn:
        widths["mixture.shared_ffn" + each] = model.mixture.shared_ffn // layout.tp
    return widths


def _check_experts(layout: Layout, model: ModelSpec) -> None:
    if layout.ep == 1:
        return
    if model.mixture is None:
        raise UserError(f"ep={layout.ep} needs experts and {model.name} has none; use ep=1")
    _check_divides(layout, model.mixture.experts, "experts=")


def _check_divides(layout: Layout, experts: int, what: str) -> None:
    if experts % layout.ep:
        near = nearest_numbers(layout.ep, lambda number: experts % number == 0, 1, experts)
        raise UserError(f"ep={layout.ep} does not divide {what}{experts}; {use('ep', near)}")
