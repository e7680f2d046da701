"""Checkpoints as tables for people."""

from cuboid.checkpoint.look import Description, Summary


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
