"""`cuboid verify --layout …`: prove that a layout computes what one process computes; `--resume`: that a chain of
them does."""

import os
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer

from cuboid.cli.options import Interface, Nodes, Oversubscribe, RanksPerNode, Rendezvous
from cuboid.data.opened import check_data
from cuboid.errors import UserError
from cuboid.launch.capacity import check_run
from cuboid.launch.once import Heard, call_here, take_post
from cuboid.launch.place import find_place, local_places
from cuboid.launch.start import NodeOptions
from cuboid.spec.layout import Layout
from cuboid.spec.run import Run, check_supported
from cuboid.strict_json import json_text
from cuboid.verification.make import check_provable, islands_runs, take, verification_run
from cuboid.verification.rounding import MULTIPLE, ROUNDED

MOST_STEPS = 10_000
"""That a proof needs; all of them are done twice before anything is said."""


def chain_runs(chain: str, model: str, overrides: tuple[str, ...], steps: int, dtype: str, seed: int) -> list[Run]:
    """One run per layout of `A -> B -> C`, equal in all but the layout."""
    layouts = [part.strip() for part in chain.split("->")]
    if len(layouts) < 2 or not all(layouts):
        raise UserError(f'--resume "{chain}" is no chain of layouts; write it like "dp=2,tp=2 -> pp=4,zero=3 -> dp=1"')

    def named(make: Callable[[str], Any]) -> list[Any]:
        made = []
        for index, layout in enumerate(layouts):
            try:
                made.append(make(layout))
            except UserError as error:
                raise UserError(f"layout {index + 1} of --resume, {layout}: {error}") from None
        return made

    named(Layout.parse)  # all of them, before one is blamed for what another lacks
    runs: list[Run] = named(
        lambda layout: verification_run(layout, model, overrides, steps * len(layouts), dtype, seed, layouts)
    )
    for run in runs:
        check_supported(run)
    return runs


def command(
    layout: Annotated[
        str | None, typer.Option(help="The layout to prove; default: dp=2,tp=2,pp=2.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help='Prove resuming instead: "dp=2,tp=2,pp=2 -> dp=4,tp=2 -> dp=1".')
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="A FOLDER with one step of another trainer, compared with one process instead.")
    ] = None,
    islands: Annotated[
        str | None,
        typer.Option(help='Prove islands instead, a layout for each: "tp=2; pp=2; dp=2,zero=3"; see [islands].'),
    ] = None,
    model: Annotated[str, typer.Option(help="A model's name, a TOML file or a Hugging Face folder.")] = "tiny-llama",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Change one field: model.layers=7.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            max=MOST_STEPS,
            help="Optimizer steps; with --resume on each layout. Default: 3; with --islands two intervals.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "bf16", "fp16", "fp8"],
        typer.Option(
            "--precision",
            help="float64 is the proof, to 1e-9. float32: to 1e-3. bf16, fp16, fp8: to 4 times what rounding alone "
            "does to one process, measured against float32 tensor by tensor, and at least 4 × 2^-8, or 4 × 2^-4 for "
            "tensors of fp8; of a mixture one step.",
        ),
    ] = "float64",
    seed: Annotated[int, typer.Option(help="Of the weights and the data.")] = 0,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one; ranks may share it.")
    ] = "auto",
    backend: Annotated[
        Literal["auto", "nccl", "gloo"], typer.Option(help="auto: NCCL on GPUs, also where ranks share one.")
    ] = "auto",
    rendezvous: Rendezvous = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    interface: Interface = None,
    oversubscribe: Oversubscribe = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Prove a layout: the loss, every gradient, the gradient norm and the parameters after clipped optimizer steps
    are compared with one plain process from the same seed. With --resume: train on each layout of a chain in turn,
    each from the checkpoint the one before it wrote, and compare with one process that was never interrupted.

    Collectives go over NCCL where ranks have GPUs. Run it as the training will run: here, under torchrun or srun with
    one process per rank, or on each node with --nodes and --rendezvous.

    Example: cuboid verify --layout dp=2,pp=4,zero=3,schedule=zbv --set model.layers=9
    """
    options = NodeOptions(rendezvous=rendezvous, nodes=nodes, ranks_per_node=ranks_per_node, interface=interface)
    if against is not None:
        chosen = (layout, resume, islands, overrides or None, steps, model, dtype, seed, device, backend, options)
        if chosen != (None, None, None, None, None, "tiny-llama", "float64", 0, "auto", "auto", NodeOptions()):
            raise UserError(
                f"--against {against} says all of the step itself; use it without --layout, --model, --set, "
                "--precision and the like"
            )
        return _verify_step(against, as_json)
    given = {"device": device, "backend": backend}
    changed = (f"training.device={device}", f"training.backend={backend}", *(overrides or ()))
    model, changed = take("model", model, changed)
    precision, changed = take("training.precision", dtype, changed)
    if islands is not None:
        if layout is not None or resume is not None or options != NodeOptions() or find_place(os.environ) is not None:
            raise UserError(
                "--islands starts the ranks of all islands on this machine; use it without --layout, --resume, "
                "--nodes, torchrun or srun"
            )
        return _verify_islands(islands_runs(islands, model, changed, steps, precision, seed), as_json, oversubscribe)
    steps = 3 if steps is None else steps
    if resume is not None:
        if layout is not None:
            raise UserError("--layout proves one layout and --resume a chain of them; use one of them")
        if options != NodeOptions() or find_place(os.environ) is not None:
            raise UserError(
                "--resume starts other ranks for each layout; use it on one machine, without --nodes, torchrun or srun"
            )
        return _verify_chain(chain_runs(resume, model, changed, steps, precision, seed), as_json, oversubscribe, given)
    run = verification_run(layout or "dp=2,tp=2,pp=2", model, changed, steps, precision, seed)
    check_supported(run)
    check_provable(run)
    check_data(run)
    post = take_post(run, options, oversubscribe, given)
    heard = Heard(silent=as_json or not post.speaks)
    if not heard.silent:
        processes = f"{run.layout.world_size} processes"
        print(
            f"{run.model.name} on {run.layout} ({processes}) against one process, {run.training.precision}", flush=True
        )
    verdict = post.call("cuboid.verification.compare:verify_rank", (run,), heard)
    if post.speaks and as_json:
        print(json_text({**verdict, **heard.backend}))
    elif post.speaks:
        _show(verdict)
    return 0 if verdict["passed"] else 1


def _verify_step(folder: str, as_json: bool) -> int:
    """Of another trainer."""
    from cuboid.verification.against import step_run  # needs torch, as nothing else here does

    run, *_ = step_run(folder)
    if not as_json:
        print(f"{run.model.name}: a step of another trainer against one process, {run.training.precision}", flush=True)
    verdict = call_here(run, local_places(1, 0, 1, "", 0, ""), "cuboid.verification.against:judge_step", (folder,))
    if as_json:
        print(json_text(verdict))
    else:
        _show(verdict, "The step", "is what one process computes")
    return 0 if verdict["passed"] else 1


def _verify_islands(runs: list[Run], as_json: bool, oversubscribe: bool) -> int:
    for run in runs:
        check_supported(run)
    check_provable(runs[0], chain=True)
    check_data(runs[0])
    ranks, called = sum(run.layout.world_size for run in runs), f"--islands of {len(runs)} layouts"
    check_run(runs[0], ranks, oversubscribe, called)
    if not as_json:
        named = "1 island" if len(runs) == 1 else f"{len(runs)} islands"
        print(f"{runs[0].model.name} on {named} against a simulation in one process, {runs[0].training.precision}")
    from cuboid.launch.islands import prove  # here, because it brings torch
    from cuboid.launch.pool import Pool

    with Pool() as pool:
        verdict = prove(runs, pool)
    if as_json:
        print(json_text(verdict))
    else:
        _show_islands(verdict)
    return 0 if verdict["passed"] else 1


def _show_islands(verdict: dict[str, Any]) -> None:
    spec, tolerance = verdict["islands"], verdict["tolerance"]
    for number, layout in enumerate(verdict["layouts"]):
        print(f"  island {number}: {layout}")
    for name in ("loss", "parameter", "outer"):
        error = verdict[f"{name}_error"]
        worst = f"  ({verdict['worst_parameter']})" if name == "parameter" and verdict["worst_parameter"] else ""
        mark = "equal" if error <= tolerance else "DIFFERS"
        print(f"  {name:<14} {mark}  largest relative error {error:.1e}{worst}")
    between = verdict["between_islands"]
    told = "equal to the bit" if between == 0 else f"DIFFER by {between:.1e}"
    print(f"  outer weights and momentum of the islands {told}")
    for line in verdict["unforeseen"][:3]:
        print(f"  not as planned: {line}")
    if not verdict["unforeseen"]:
        print(f"  {verdict['wire_bytes']:,} bytes between islands, as planned to the byte")
    what = f"every={spec['every']}, fragments={spec['fragments']}, delay={spec['delay']}, bits={spec['bits']}"
    end = "equal" if verdict["passed"] else "are NOT equal to"
    print(f"The islands {end} their simulation within {tolerance:.0e} over {verdict['steps']} steps ({what}).")


def _verify_chain(runs: list[Run], as_json: bool, oversubscribe: bool, given: Mapping[str, str | None]) -> int:
    """Each layout in its own ranks; nothing passes from one to the next but what is on disk."""
    check_provable(runs[0], chain=True)
    check_data(runs[0])
    posts = [take_post(run, NodeOptions(), oversubscribe, given) for run in runs]
    steps = runs[0].training.steps // len(runs)
    if not as_json:
        dtype = runs[0].training.precision
        print(f"{runs[0].model.name}, {steps} steps on each layout, against one uninterrupted process, {dtype}")
    losses, heard = [], Heard(silent=as_json)
    with TemporaryDirectory(prefix="cuboid-") as folder:
        for index, (run, post) in enumerate(zip(runs, posts, strict=True)):
            leg = (run, folder, index * steps, (index + 1) * steps)
            losses.append(post.call("cuboid.verification.resume:train_leg", leg, heard))
        alone = local_places(1, 0, 1, "", 0, "")
        verdict = call_here(runs[0], alone, "cuboid.verification.resume:judge_chain", (runs, folder, losses))
    if as_json:
        print(json_text({**verdict, **heard.backend}))
    else:
        _show_chain(verdict)
    return 0 if verdict["passed"] else 1


def _show_chain(verdict: dict[str, Any]) -> None:
    for leg in verdict["legs"]:
        mark = "equal" if leg["passed"] else "DIFFERS"
        names = {"loss": "loss", "parameter": "parameters", "first_moment": "moments", "second_moment": "and"}
        errors = "  ".join(f"{shown} {leg[f'{name}_error']:.1e}" for name, shown in names.items())
        print(f"  steps {leg['first_step']:>3}-{leg['last_step']:<3} {leg['layout']:<44} {mark}  {errors}")
    if verdict["passed"]:
        print(
            f"The changes of layout lost nothing: all within {verdict['tolerance']:.0e} over {verdict['steps']} steps."
        )
        return
    if verdict["located"] is not None:
        _show_located(verdict["located"])
    leg = next(leg for leg in verdict["legs"] if not leg["passed"])
    print(f"The chain is NOT equal to one process within {verdict['tolerance']:.0e}, from {leg['layout']} on.")


def _show(verdict: dict[str, Any], what: str = "The layout", right: str = "changed nothing but speed") -> None:
    rounded = verdict["dtype"] in ROUNDED
    for name, tolerance in verdict["tolerances"].items():
        error = verdict[f"{name}_error"]
        worst = f"  ({verdict[f'worst_{name}']})" if f"worst_{name}" in verdict else ""
        mark = "equal" if error <= tolerance else "DIFFERS"
        # In bf16 and the like each tensor has a bound of its own; shown is the one that comes nearest to it.
        told = f"error {error:.1e} of {tolerance:.1e} allowed" if rounded else f"largest relative error {error:.1e}"
        print(f"  {name.replace('_', ' '):<14} {mark}  {told}{worst}")
    for line in verdict["deviations"][:3]:
        print(f"  copies         DIFFER: {line}")
    for line in verdict["unforeseen"][:3]:
        print(f"  communication  not as the planner counts it: {line}")
    steps = f"{verdict['steps']} clipped optimizer steps"
    within = f"{MULTIPLE:g} times the rounding of one process" if rounded else f"{verdict['tolerance']:.0e}"
    if verdict["passed"]:
        print(f"{what} {right}: all within {within} over {steps}.")
    else:
        _show_located(verdict["located"])
        print(f"{what} is NOT equal to one process within {within} over {steps}.")


def _show_located(located: dict[str, Any] | None) -> None:
    if located is None:
        print("  What differs is further off at the end of a step than in any tensor within it.")
        return
    place = [f"step {located['step']}"]
    place += [
        f"{kind.replace('_', '-')} {located[kind]}" for kind in ("micro_batch", "rank") if located[kind] is not None
    ]
    print(f"  first wrong    {located['tensor']}: {located['where']} of {', '.join(place)}")
    print(f"  module         {located['module']}")
    print(f"  error          {located['error']:.1e} of {located['allowed']:.1e} allowed")
    print(f"  likely cause   {located['cause']}")
