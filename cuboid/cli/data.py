"""`cuboid data build|show|verify`: stores of tokens, made from text and looked at."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from cuboid.data.build import BuildReport, BuildRequest, Progress, build
from cuboid.data.indexed import open_pair
from cuboid.data.store import TOKENIZER, Store, check_store, is_store, open_store
from cuboid.data.tokenizer import BYTES, load_tokenizer
from cuboid.errors import UserError, printable
from cuboid.strict_json import json_text

SHOWN = 300
"""Characters of the first document."""


def command(
    action: Annotated[Literal["build", "show", "verify"], typer.Argument(help="What to do.", show_default=False)],
    paths: Annotated[list[str], typer.Argument(help="build: files and folders. show, verify: stores.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="build: the store to make.")] = None,
    tokenizer: Annotated[str, typer.Option(help="build: byte, or a Hugging Face tokenizer.json.")] = BYTES,
    end_of_document: Annotated[
        str | None, typer.Option(help="build: token after each document; default: the tokenizer's own.")
    ] = None,
    field: Annotated[str, typer.Option(help="build: where JSON Lines, Parquet and datasets hold the text.")] = "text",
    completions: Annotated[
        bool, typer.Option("--completions", help="build: prompts and completions, or messages by the chat template.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="build: at work together; 0 is one per core.")] = 0,
    restart: Annotated[
        bool, typer.Option("--restart", help="build: do without the parts of an earlier attempt.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn text into a store of tokens, show a store, or verify every byte of it.

    Reads text, JSON Lines (plain, .gz, .zst), Parquet and Hugging Face datasets folders. A build that was killed
    continues where it stopped when the same command runs again.

    Example: cuboid data build corpus/ more.jsonl.gz -o stores/mine --tokenizer tokenizer.json
    """
    if action == "build":
        if output is None:
            raise UserError(f"data build needs a name for the store; add -o {Path(paths[0]).stem}-tokens")
        request = BuildRequest(
            sources=tuple(paths),
            output=output,
            tokenizer=tokenizer,
            end_of_document=end_of_document,
            kind="completions" if completions else "text",
            field=field,
            workers=workers or os.cpu_count() or 1,
            restart=restart,
        )
        _show_report(build(request) if as_json else _build_with_bar(request), as_json)
        return
    for path in paths:
        if is_store(Path(path)):
            _show_store(check_store(path) if action == "verify" else open_store(path), action == "verify", as_json)
        else:
            _show_pair(path, action == "verify", as_json)


def _build_with_bar(request: BuildRequest) -> BuildReport:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[tokens]:,} tokens"))
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    task = bar.add_task("reading", total=None, tokens=0)

    def report(progress: Progress) -> None:
        bar.start()  # not before there is something to report: what is refused at once has no bar
        bar.update(task, total=progress.total, completed=progress.read, tokens=progress.tokens)

    try:
        return build(request, report)
    except KeyboardInterrupt:
        print("\nstopped; the same command again resumes from here", file=sys.stderr)
        raise
    finally:
        if bar.live.is_started:
            bar.stop()


def _show_report(report: BuildReport, as_json: bool) -> None:
    if as_json:
        print(json_text(asdict(report)))
        return
    held = f"{report.tokens:,} tokens of {report.documents:,} documents"
    print(printable(f"{report.store}: {held}, vocabulary {report.vocabulary:,}"))
    if report.empty_documents:
        lacking = "documents without text" if report.kind == "text" else "rows without an answer to learn"
        print(f"{report.empty_documents:,} {lacking} were skipped")
    if report.resumed_tokens == report.tokens:
        print("All of it was there already.")
        return
    if report.resumed_tokens:
        print(f"{report.resumed_tokens:,} tokens were there from an earlier attempt")
    print(f"{report.tokens_per_second:,.0f} tokens/s, {report.seconds:.1f} s in all")


def _show_store(store: Store, verified: bool, as_json: bool) -> None:
    manifest = store.manifest
    if as_json:
        print(json_text({"store": str(store.folder), "verified": verified, **asdict(manifest)}))
        return
    size = sum(entry.size for entry in manifest.files.values())
    held = f"{manifest.tokens:,} tokens of {manifest.documents:,} documents"
    print(printable(f"{store.folder}: {held}, {size:,} bytes"))
    print(
        printable(
            f"kind {manifest.kind}, {manifest.type} tokens below {manifest.vocabulary:,}, "
            f"{manifest.end_of_document} ends a document"
        )
    )
    print(f"made from {len(manifest.sources):,} files of {sum(source.size for source in manifest.sources):,} bytes")
    if verified:
        print("Every byte is what the manifest says.")
        return
    name = str(store.folder / TOKENIZER) if TOKENIZER in manifest.files else BYTES
    tokens = store.tokens.document(0)[: 4 * SHOWN].tolist()
    print(f"the first document begins: {load_tokenizer(name).decode(tokens)[:SHOWN]!r}")


def _show_pair(path: str, verify: bool, as_json: bool) -> None:
    pair = open_pair(path)
    if verify:
        from cuboid.data.indexed import check_pair

        check_pair(path)
    facts = {
        "pair": path,
        "verified": verify,
        "tokens": len(pair.tokens),
        "documents": pair.documents,
        "type": pair.tokens.dtype.name,
    }
    if as_json:
        print(json_text(facts))
    else:
        held = f"{len(pair.tokens):,} tokens of {pair.documents:,} documents"
        print(printable(f"{path}: {held}, {pair.tokens.dtype.name}"))
