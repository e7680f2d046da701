"""`cuboid replay RUN --step N`: one step of a run again, to tell bad data from bad hardware."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cuboid.checkpoint.folder import checkpoints, step_of
from cuboid.checkpoint.location import Location
from cuboid.checkpoint.manifest import Manifest
from cuboid.checkpoint.verify import verify
from cuboid.cli.options import Interface, Nodes, Oversubscribe, RanksPerNode, Rendezvous
from cuboid.errors import UserError
from cuboid.launch.once import Heard, take_post
from cuboid.launch.start import NodeOptions
from cuboid.resilience.bad_steps import bad_steps, number
from cuboid.spec.plugin import layout_for
from cuboid.spec.run import Run, check_supported, load_run
from cuboid.strict_json import json_text
from cuboid.telemetry.rows import metric_rows
from cuboid.training.run_folder import RUN_FILE, checkpoint_folder

if TYPE_CHECKING:
    from cuboid.verification.replay import Logged, Replayed, Verdict

SHOWN = 8


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[int, typer.Option(help="Which step, counted from 1.")],
    layout: Annotated[str | None, typer.Option(help="Layout in place of the run's, e.g. dp=1.")] = None,
    times: Annotated[int, typer.Option(min=2, help="How many times.")] = 2,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="In place of the run's.", show_default=False)
    ] = None,
    backend: Annotated[
        Literal["auto", "nccl", "gloo"] | None, typer.Option(help="In place of the run's.", show_default=False)
    ] = None,
    rendezvous: Rendezvous = None,
    nodes: Nodes = None,
    ranks_per_node: RanksPerNode = None,
    interface: Interface = None,
    oversubscribe: Oversubscribe = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object.")] = False,
) -> None:
    """Rerun one step of a run on the same data, several times: the same bad value each time is the fault of the data, a
    different one that of the hardware. Nothing is written into the run's folder, which all nodes see.

    Under torchrun or srun this process is one rank of the replay; on many nodes the command runs on each of them, with
    --nodes and --rendezvous.

    Example: cuboid replay runs/demo --step 17
    """
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"RUN={folder} has no {RUN_FILE}; name the folder of a run")
    run = load_run(folder / RUN_FILE)
    if not 1 <= step <= run.training.steps:
        raise UserError(f"--step {step} is no step of {folder}; use 1 to {run.training.steps}")
    if run.islands.count > 1:
        raise UserError(
            f"islands.count={run.islands.count} cannot be replayed: batches and outer weights came from other islands; "
            "name the folder of a run without islands"
        )
    run = replace(run, output=replace(run.output, folder=str(folder)))
    if layout is not None:
        run = replace(run, layout=layout_for(run.model, layout))
    own = run.training
    run = replace(run, training=replace(own, device=device or own.device, backend=backend or own.backend))
    check_supported(run)
    options = NodeOptions(rendezvous=rendezvous, nodes=nodes, ranks_per_node=ranks_per_node, interface=interface)
    post = take_post(run, options, oversubscribe, {"device": device, "backend": backend})
    from cuboid.verification.replay import judge

    heard, job, asked = (
        Heard(silent=as_json or not post.speaks),
        "cuboid.verification.replay:replay_rank",
        f"{step} {times}",
    )
    if not post.speaks:  # one process looks for the checkpoint and reads all of it
        post.call(job, (), heard, asked)
        return
    checkpoint, manifest, newest = _start(run, step)
    logged = _logged(run, folder, step, newest)
    done = manifest.step if manifest else 0
    if not as_json:
        begin = f"the checkpoint after step {done}" if done else "the beginning"
        print(f"step {step} on {run.layout}, from {begin}, {times} times", flush=True)
    replayed = post.call(job, (run, str(checkpoint or ""), done, step - 1, times, logged), heard, asked)
    verdict = judge(replayed.attempts, logged, run)
    if as_json:
        print(json_text({**_table(step, run, done, logged, replayed, verdict), **heard.backend}))
    else:
        _show(logged, replayed, verdict)


def _start(run: Run, step: int) -> tuple[Location | None, Manifest | None, Manifest | None]:
    """The newest whole checkpoint from which the step can be reached, and the newest manifest of all."""
    newest: Manifest | None = None
    for path in reversed(checkpoints(checkpoint_folder(run))):
        try:
            manifest = verify(path, contents=step_of(path) < step)
        except UserError:
            continue
        newest = newest or manifest
        if manifest.step < step:
            return path, manifest, newest
    return None, None, newest


def _logged(run: Run, folder: Path, step: int, newest: Manifest | None) -> "Logged":
    from cuboid.verification.replay import Logged, Seen

    rows = {row["step"]: row for row in metric_rows(folder / "metrics.jsonl")}
    left_out = tuple(
        row["step"] - 1
        for row in rows.values()
        if row["step"] < step and (row.get("left_out") or not row.get("finite", True))
    )
    for row in reversed(bad_steps(folder)):
        if row["step"] == step and "batch" in row:
            squares = tuple(map(float, row["squared_norms"]))
            seen = Seen(float(row["loss"]), float(row["gradient_norm"]), squares)
            return Logged(seen, row["reason"], tuple(row["skipped"]), left_out, row["layout"])
    skipped = tuple(newest.course.get("skipped", ())) if newest else ()
    layout = str(load_run(folder / RUN_FILE).layout)
    row = rows.get(step)
    if row is None:
        return Logged(None, "", skipped, left_out, layout)
    if row.get("loss") is None or row.get("gradient_norm") is None:
        return Logged(None, "not finite", skipped, left_out, layout)
    return Logged(Seen(row["loss"], row["gradient_norm"]), row.get("left_out", ""), skipped, left_out, layout)


def _table(
    step: int, run: Run, done: int, logged: "Logged", replayed: "Replayed", verdict: "Verdict"
) -> dict[str, Any]:
    seen = asdict(logged.seen) if logged.seen else None
    return {
        "step": step,
        "layout": str(run.layout),
        "from_step": done,
        "batch": replayed.batch,
        "logged": {**_finite(seen or {}), "reason": logged.reason, "layout": logged.layout},
        "attempts": [_finite(asdict(attempt)) for attempt in replayed.attempts],
        **asdict(verdict),
        "samples": replayed.samples,
    }


def _finite(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: number(value) if isinstance(value, float) else [number(each) for each in value]
        for key, value in table.items()
    }


def _show(logged: "Logged", replayed: "Replayed", verdict: "Verdict") -> None:
    if logged.seen is not None:
        said = f"  ({logged.reason})" if logged.reason else ""
        print(f"the run   loss {logged.seen.loss!r}  norm {logged.seen.gradient_norm!r}{said}")
    for index, attempt in enumerate(replayed.attempts, start=1):
        odd = [rank for rank, square in enumerate(attempt.squared_norms) if not math.isfinite(square)]
        where = f"  (rank {', '.join(map(str, odd))})" if odd else ""
        print(f"replay {index}  loss {attempt.loss!r}  norm {attempt.gradient_norm!r}{where}")
    print(f"{verdict.cause}: {verdict.sentence}" + (" (bit for bit)" if verdict.identical else ""))
    print(f"batch {replayed.batch + 1} of the data:")
    for sample in replayed.samples[:SHOWN]:
        documents = sample.get("documents")
        held = f", documents {documents[0]}–{documents[1]}" if documents else ""
        print(f"  position {sample['position']}: {sample.get('source', '')} sample {sample.get('sample', '')}{held}")
    if len(replayed.samples) > SHOWN:
        print(f"  and {len(replayed.samples) - SHOWN} more (--json names all)")
