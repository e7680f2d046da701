"""`cuboid checkpoint ls|verify|show|copy|prune`: look at checkpoints, prove them whole, copy and remove them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cuboid.checkpoint.folder import copy, newest_whole, require_checkpoints, superfluous, withdraw
from cuboid.checkpoint.inspect import Description, Summary, describe, find, held_bytes, summarize
from cuboid.checkpoint.location import Location, locate
from cuboid.checkpoint.manifest import Damage, Watch
from cuboid.errors import UserError
from cuboid.outputs import check_way
from cuboid.spec.run import load_run
from cuboid.strict_json import json_text
from cuboid.training.run_folder import RUN_FILE

Action = Literal["ls", "verify", "show", "copy", "prune"]


def command(
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    place: Annotated[str, typer.Argument(help="A run's folder, its checkpoints, or one of them; a path or a URL.")],
    target: Annotated[str | None, typer.Argument(help="copy: the folder of checkpoints to copy into.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="ls: compare checksums too, as verify does.")] = False,
    filter_text: Annotated[str, typer.Option("--filter", help="show: only tensors whose name contains this.")] = "",
    keep: Annotated[int | None, typer.Option(help="prune: how many of the newest stay.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="prune: say what would go, and keep it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Look at checkpoints (ls, show), prove every byte of them (verify), copy one, or remove old ones (prune).

    show and copy take the newest that verifies where PLACE holds several. Exit status 1: something is damaged.

    Example: cuboid checkpoint verify runs/default
    """
    protocol, _, path = (target or "").rpartition("://")
    if target is not None and protocol in ("", "file", "local"):
        check_way(f"target={protocol}://" if protocol else "target=", path)
    if target is not None and action != "copy":
        raise UserError(f"checkpoint {action} takes one place, not also {target}; omit it")
    try:
        if action == "show":
            return _show(_newest(place, as_json), filter_text, as_json)
        if action == "copy":
            return _copy(_newest(place, as_json), target, as_json)
        if action == "prune":
            return _prune(place, keep, dry_run, as_json)
        return _list(_find(place), deep or action == "verify", action == "verify", as_json)
    except Damage as damage:
        print(f"error: {damage}", file=sys.stderr)
        return 1


def _find(place: str) -> list[Location]:
    """A run may keep its checkpoints elsewhere; its folder may have moved since it was written."""
    run_file = Path(place) / RUN_FILE
    elsewhere = load_run(run_file).checkpoint.folder if run_file.is_file() else ""
    return find(elsewhere or place)


def _list(found: list[Location], contents: bool, judged: bool, as_json: bool) -> int:
    total = sum(held_bytes(checkpoint) for checkpoint in found) if contents else 0
    with _progress("verifying", total, as_json or not contents) as watch:
        summaries = [summarize(checkpoint, contents, watch) for checkpoint in found]
    damaged = sum(bool(summary.damaged) for summary in summaries)
    if as_json:
        print(json_text({"checkpoints": [_row(summary) for summary in summaries], "damaged": damaged}))
    else:
        show_summaries(summaries)
        if judged:
            total = sum(summary.bytes for summary in summaries)
            whole = f"{len(summaries) - damaged} of {len(summaries)} checkpoints are whole, {size_of(total)} read."
            print(whole if damaged else f"Every byte of {size_of(total)} is what the manifests say.")
    return 1 if judged and damaged else 0


def _row(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "whole": not summary.damaged, "seconds_old": summary.seconds_old}


def _newest(place: str, as_json: bool) -> Location:
    found = _find(place)
    if len(found) == 1:
        return found[0]
    with _progress("verifying", held_bytes(found[-1]), as_json) as watch:
        newest, _, damaged = newest_whole(found[0].parent, watch=watch)
    for sentence in damaged:
        print(f"warning: {sentence}", file=sys.stderr)
    if newest is None:
        raise Damage(found[-1].parent, "every one", "of its checkpoints is damaged")
    return newest


def _show(checkpoint: Location, filter_text: str, as_json: bool) -> int:
    description: Description = describe(checkpoint, filter_text)
    if filter_text and not description.tensors:
        raise UserError(f"--filter {filter_text} matches no tensor; omit it to see all names")
    if as_json:
        print(json_text(asdict(description)))
    else:
        show_description(description)
    return 0


def _copy(checkpoint: Location, target: str | None, as_json: bool) -> int:
    if target is None:
        raise UserError("checkpoint copy needs a folder to copy into; add it behind the checkpoint")
    with _progress("copying", 3 * held_bytes(checkpoint), as_json) as watch:
        written = copy(checkpoint, target, watch)
    size = held_bytes(written)
    if as_json:
        print(json_text({"checkpoint": str(checkpoint), "copy": str(written), "bytes": size, "verified": True}))
    else:
        print(f"{checkpoint} copied to {written}, {size_of(size)}, every byte verified")
    return 0


def _prune(place: str, keep: int | None, dry_run: bool, as_json: bool) -> int:
    if keep is None or keep < 1:
        raise UserError(f"checkpoint prune with --keep {keep or 0} would keep nothing; use --keep 1 or more")
    found = _find(place)
    if str(found[0]) == str(locate(place)):
        raise UserError(f"{found[0]} is one checkpoint; prune takes a folder of them, use {found[0].parent}")
    require_checkpoints(found[0].parent)
    with _progress("verifying", held_bytes(found[-1]), as_json) as watch:
        going = superfluous(found[0].parent, keep, watch=watch)
    freed = sum(held_bytes(checkpoint) for checkpoint in going)
    if not dry_run:
        for checkpoint in going:
            withdraw(checkpoint)
    if as_json:
        kept = [str(checkpoint) for checkpoint in found if checkpoint not in going]
        gone = [str(checkpoint) for checkpoint in going]
        print(json_text({"removed": gone, "kept": kept, "bytes": freed, "dry_run": dry_run}))
        return 0
    for checkpoint in going:
        print(f"{'would remove' if dry_run else 'removed'} {checkpoint}")
    free = "would be" if dry_run else "are"
    print(f"{len(found) - len(going)} of {len(found)} stay; {size_of(freed)} {free} free again")
    return 0


@contextmanager
def _progress(doing: str, total: int, silent: bool) -> Iterator[Watch | None]:
    """A bar on the terminal, if there is one: gigabytes take a while."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(doing), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        advance: Callable[[int], None] = lambda count: bar.advance(task, count)  # noqa: E731
        yield advance


# Checkpoints as tables for people.


def size_of(count: int) -> str:
    for unit, word in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {word}"
    return f"{count} B"


def plain(text: str) -> str:
    """Without what would move the cursor of a terminal: names may come from a stranger."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds:.0f} seconds"


def show_summaries(summaries: list[Summary]) -> None:
    rows = [("step", "layout", "size", "age", "state")]
    for summary in summaries:
        state = "whole" if summary.checked == "contents" else "whole by size"
        if summary.damaged:
            state = "DAMAGED: " + "; ".join(
                f"{plain(each['file'])} {plain(each['reason'])}" for each in summary.damaged
            )
        step = "?" if summary.step is None else str(summary.step)
        rows.append((step, plain(summary.layout) or "?", size_of(summary.bytes), _age(summary.seconds_old), state))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for step, layout, size, age, state in rows:
        shown = (step.rjust(widths[0]), layout.ljust(widths[1]), size.rjust(widths[2]), age.rjust(widths[3]), state)
        print("  ".join(shown))


def show_description(description: Description) -> None:
    facts = description
    skipped = facts.step - facts.updates
    left_out = f", {skipped} updates skipped as not finite" if skipped else ""
    print(f"{facts.checkpoint}: {plain(facts.model)}, {facts.parameters:,} parameters, {plain(facts.precision)}")
    print(f"after step {facts.step:,}: {facts.position:,} samples, {facts.tokens:,} tokens{left_out}")
    print(f"written {plain(facts.written)} on {plain(facts.layout)}")
    print(f"by Cuboid {plain(facts.version)} with torch {plain(facts.torch_version)}")
    print(f"{len(facts.files)} files, {size_of(facts.bytes)}; data {plain(facts.data)}")
    rows = [
        (plain(tensor.name), "×".join(map(str, tensor.shape)), tensor.dtype, size_of(tensor.bytes), f"{tensor.chunks}")
        for tensor in facts.tensors
    ]
    rows.insert(0, ("tensor", "shape", "type", "size", "chunks"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for name, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print("  ".join((name.ljust(widths[0]), *cells)))
