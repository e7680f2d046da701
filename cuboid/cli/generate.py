"""`cuboid generate RUN --prompt …`: text from a trained model, on any layout."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cuboid.cli.options import Oversubscribe
from cuboid.errors import UserError
from cuboid.generate.detokenizer import Words
from cuboid.generate.prompts import (
    Prompt,
    Results,
    Texts,
    check_words,
    longest,
    make_prompt,
    make_requests,
    read_prompts,
)
from cuboid.launch.generation import start_generation
from cuboid.spec.generation import GenerationSpec, SamplingSpec, check_layout, parse_layout
from cuboid.strict_json import json_text


def command(
    target: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, or hf:FOLDER.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="File of prompts: lines of text, or JSON Lines.")] = None,
    layout: Annotated[str, typer.Option(help="Ranks to spread the model over, e.g. tp=2,pp=2,dp=2.")] = "dp=1",
    max_tokens: Annotated[int, typer.Option(help="Most tokens after each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy: always the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens of this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this part of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens of the text so far lose.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text before which a result ends.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random numbers; the layout changes nothing in them.")] = 0,
    draft: Annotated[
        int, typer.Option(help="Tokens that prediction layers draft for the model to check; the text stays the same.")
    ] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time on each replica.")] = 32,
    precision: Annotated[str | None, typer.Option(help="float32, bf16 or float64; default: as trained.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[
        str, typer.Option(help="nccl, gloo or auto: NCCL on GPUs, also where ranks share one.")
    ] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="byte, or a tokenizer.json in place of the model's.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Add results as JSON Lines; a second run continues with it.")
    ] = None,
    oversubscribe: Oversubscribe = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, at the end.")] = False,
) -> None:
    """Generate text with a trained model. Seed and prompt decide the text, the layout only how fast it comes.

    Example: cuboid generate runs/demo --prompt "def main(" --layout tp=2,pp=2 --max-tokens 100
    """
    sampling = SamplingSpec(
        max_tokens=max_tokens,
        repetition_penalty=repetition_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=tuple(stop or ()),
        seed=seed,
    )
    wanted = parse_layout(layout)
    from cuboid.generate.target import find_target  # here, because it brings torch, for which the rest need not wait

    found = find_target(target, tokenizer)
    for note in found.notes:
        print(f"warning: {note}", file=sys.stderr)
    check_layout(wanted, found.model)
    check_words(sampling, found.words)
    given = _prompts(prompt, prompts, found.words, found.model.vocab)
    requests = make_requests(given, sampling, found.model)
    spec = GenerationSpec(
        model=found.model,
        layout=wanted,
        weights=found.weights,
        precision=precision or found.precision,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        slots=min(batch, -(-len(requests) // wanted.dp)),
        length=longest(requests),
        draft=draft,
    )
    made_with = {"model": found.weights, "precision": spec.precision, **asdict(sampling), "stop": list(sampling.stop)}
    results = Results(output, given, made_with) if output is not None else None
    rows: dict[int, dict[str, Any]] = dict(results.done) if results is not None else {}

    def keep(row: dict[str, Any]) -> None:
        rows[row["index"]] = row
        if results is not None:
            results.add(row)

    left = [each for each in given if each.number not in rows]
    texts = Texts(left, found.words, sampling.stop, _shown(len(given), as_json), keep)
    backend_used: dict[str, Any] = {"backend": None, "gpu_shared": False}

    def joined(told: dict[str, Any]) -> None:
        backend_used.update({name: told[name] for name in backend_used})
        if not as_json:
            print(told["sentence"], file=sys.stderr, flush=True)

    if left:
        start_generation(
            spec, [requests[each.number] for each in left], sampling, found.words, texts.hear, joined, oversubscribe
        )
    _conclude(rows, texts, len(given) - len(left), output, as_json, backend_used)


def _prompts(prompt: list[str] | None, file: Path | None, words: Words, vocabulary: int) -> list[Prompt]:
    if file is not None and prompt:
        raise UserError(f"prompt and prompts={file} both say what to continue; use one of them")
    if file is not None:
        return read_prompts(file, words, vocabulary)
    if not prompt:
        raise UserError('there is no prompt; use --prompt "Once upon a time" or --prompts FILE')
    return [make_prompt(number, text, words, vocabulary, f"prompt {number}") for number, text in enumerate(prompt)]


def _shown(count: int, as_json: bool) -> Any:
    begun: set[int] = set()

    def show(prompt: Prompt, new: str, whole: bool) -> None:
        if as_json:
            return
        if prompt.number not in begun and count > 1:
            print(f"── {prompt.number}: {prompt.text}")
        begun.add(prompt.number)
        print(new, end="\n" if whole else "", flush=True)

    return show


def _conclude(
    rows: dict[int, dict[str, Any]],
    texts: Texts,
    skipped: int,
    output: Path | None,
    as_json: bool,
    backend_used: dict[str, Any],
) -> None:
    if as_json:
        summary = {
            "results": [rows[number] for number in sorted(rows)],
            "skipped": skipped,
            "new_tokens": texts.tokens,
            "drafts": texts.drafts,
            "accepted_drafts": texts.accepted,
            "seconds": texts.seconds,
            "first_token_seconds": texts.first_token_seconds,
            **backend_used,
        }
        print(json_text(summary, ascii_only=False))
        return
    where = f"; {output}" if output is not None else ""
    done = f", {skipped} were done before" if skipped else ""
    drafts = f", {texts.accepted} of {texts.drafts} drafts accepted" if texts.drafts else ""
    print(f"{texts.tokens} tokens in {texts.seconds:.1f} s{drafts}{done}{where}", file=sys.stderr)
