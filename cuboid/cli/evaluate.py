"""`cuboid evaluate RUN --data SOURCE`: how well a trained model predicts text, on any layout."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from cuboid.cli.options import Oversubscribe
from cuboid.errors import UserError
from cuboid.generate.batch import Request
from cuboid.generate.detokenizer import Words
from cuboid.generate.evaluation import Perplexity, choice_requests, judge, read_questions, windows
from cuboid.launch.generation import start_scoring
from cuboid.spec.generation import GenerationSpec, check_layout, parse_layout
from cuboid.spec.layout import Layout
from cuboid.spec.model import ModelSpec
from cuboid.strict_json import json_text


def command(
    target: Annotated[str, typer.Argument(help="A run's folder, a checkpoint, or hf:FOLDER.")],
    data: Annotated[
        str | None, typer.Option(help="held-out (of the run), a store, a Megatron pair, a text file or python-stdlib.")
    ] = None,
    choices: Annotated[Path | None, typer.Option(help="JSON Lines of prompt, choices and answer.")] = None,
    harness: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, e.g. hellaswag,arc_easy; an extra package.")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Folder with tasks of one's own for --harness, as YAML.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many questions of each task.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples before each question of a task.")] = None,
    layout: Annotated[str, typer.Option(help="Ranks to spread the model over, e.g. tp=2,pp=2,dp=2.")] = "dp=1",
    sequence: Annotated[
        int | None, typer.Option("--seq", "--sequence", min=1, help="Tokens at a time; default: as in training.")
    ] = None,
    overlap: Annotated[int, typer.Option(min=0, help="Tokens before them that are seen but not counted.")] = 0,
    tokens: Annotated[
        float | None, typer.Option(min=2, help="How many tokens of the data, from its beginning; default: 131072.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time on each replica.")] = 8,
    precision: Annotated[str | None, typer.Option(help="float32, bf16 or float64; default: as trained.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[
        str, typer.Option(help="nccl, gloo or auto: NCCL on GPUs, also where ranks share one.")
    ] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="byte, or a tokenizer.json in place of the model's.")] = None,
    oversubscribe: Oversubscribe = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a trained model: perplexity and bits per byte of text, or choices by their likelihood.

    Example: cuboid evaluate runs/demo --data held-out --tokens 20000 --layout tp=2,pp=2
    """
    if [data, choices, harness].count(None) != 2:
        raise UserError(
            "evaluate needs one thing to measure; use --data held-out, --data STORE, --choices FILE or --harness TASKS"
        )
    wanted = parse_layout(layout)
    from cuboid.generate.target import find_target  # here, because it brings torch, for which the rest need not wait

    found = find_target(target, tokenizer)
    check_layout(wanted, found.model)
    if harness is not None:
        measured_tasks = evaluate_tasks(
            found,
            wanted,
            [name for name in harness.split(",") if name],
            folder=tasks,
            limit=limit,
            shots=shots,
            batch=batch,
            precision=precision,
            device=device,
            backend=backend,
            oversubscribe=oversubscribe,
        )
        print(json_text({"results": measured_tasks}) if as_json else harness_table(measured_tasks))
        return
    if choices is not None:
        _require_words(found.words)
        questions = read_questions(choices)
        requests = choice_requests(questions, found.words)
    else:
        from cuboid.generate.evaluation import read_tokens

        assert data is not None
        if tokens is not None and not tokens.is_integer():
            raise UserError(f"tokens={tokens:g} is no number of tokens; use --tokens 20000 or --tokens 1e6")
        count = None if tokens is None else int(tokens)
        read = read_tokens(data, count, found.words, found.model.vocab, found.run, found.data)
        held = read.tokens
        trained = found.run.training.sequence if found.run is not None else 2048
        requests = windows(held, sequence or min(trained, found.model.max_positions), overlap)
    _check_length(requests, found.model)
    spec = GenerationSpec(
        model=found.model,
        layout=wanted,
        weights=found.weights,
        precision=precision or found.precision,  # type: ignore[arg-type]
        device=device,  # type: ignore[arg-type]
        backend=backend,  # type: ignore[arg-type]
        slots=min(batch, -(-len(requests) // wanted.dp)),
        length=max(len(request.tokens) for request in requests),
    )
    start = time.perf_counter()
    said: dict[str, Any] = {"backend": None, "gpu_shared": False}

    def joined(told: dict[str, Any]) -> None:
        said.update({name: told[name] for name in ("backend", "gpu_shared")})
        if not as_json:
            print(told["sentence"], file=sys.stderr, flush=True)

    scores = start_scoring(spec, requests, joined, oversubscribe)
    said["seconds"] = time.perf_counter() - start
    if choices is not None:
        accuracy = judge(questions, [score.likelihood for score in scores])
        said |= {
            "questions": accuracy.questions,
            "accuracy": accuracy.right / accuracy.questions,
            "accuracy_by_byte": accuracy.right_by_byte / accuracy.questions,
            "chosen": list(accuracy.chosen),
        }
        text = f"{accuracy.right} of {accuracy.questions} right, {accuracy.right_by_byte} by likelihood per byte"
    else:
        counted = sum(score.tokens for score in scores)
        loss = -sum(score.likelihood for score in scores) / counted
        size = len(found.words.decode(held[1 : counted + 1]).encode())
        measured = Perplexity(counted, loss, size)
        said |= {
            "tokens": counted,
            "trained_on": read.trained_on,
            "loss": loss,
            "perplexity": measured.perplexity,
            "bytes": size,
            "bits_per_byte": measured.bits_per_byte,
        }
        text = f"{counted:,} tokens: loss {loss:.6f}, perplexity {measured.perplexity:.4f}"
        text += f", {measured.bits_per_byte:.4f} bits per byte" if measured.bits_per_byte is not None else ""
    print(json_text(said) if as_json else f"{text} ({said['seconds']:.1f} s)")
    if data is not None and read.trained_on:
        print(
            f"warning: the model was trained on data={data}, so this says how well it remembers; use --data held-out, "
            "or data it has not seen",
            file=sys.stderr,
        )
    for note in found.notes:
        print(f"warning: {note}", file=sys.stderr)


def _require_words(words: Words) -> None:
    if not words.tokenizer:
        raise UserError("the model has no tokenizer for text; use --tokenizer byte or --tokenizer FOLDER")


def _check_length(requests: list[Request], model: ModelSpec) -> None:
    longest = max(len(request.tokens) for request in requests)
    if longest > model.max_positions:
        raise UserError(
            f"{longest} tokens at a time are more than max_positions={model.max_positions} of {model.name}; "
            f"use --sequence and --overlap with {model.max_positions} together, or shorter questions"
        )


# `cuboid evaluate RUN --harness TASKS`: tasks of lm-evaluation-harness, an optional extra.


def evaluate_tasks(
    target: Any,
    layout: Layout,
    tasks: list[str],
    *,
    folder: Path | None,
    limit: int | None,
    shots: int | None,
    batch: int,
    precision: str | None,
    device: str,
    backend: str,
    oversubscribe: bool,
) -> dict[str, Any]:
    """The harness's results, by task."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("--harness needs lm-evaluation-harness; pip install 'cuboid[harness]'") from None
    from cuboid.launch.harness import CuboidModel

    if folder is not None and not folder.is_dir():
        raise UserError(f"tasks={folder} is no folder; name one with tasks as YAML")
    # The thousands that the harness brings are read only where they are asked for.
    manager = TaskManager(include_path=folder and str(folder), include_defaults=False) if folder else None
    if manager is None or set(tasks) - set(manager.all_tasks):
        manager = TaskManager(include_path=folder and str(folder))
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        raise UserError(f"harness={unknown[0]} is no task that lm_eval knows; lm-eval ls tasks shows them")
    model = CuboidModel(target, layout, batch, precision, device, backend, oversubscribe)
    try:
        found = simple_evaluate(model, tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager)
    except (OSError, ConnectionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the data of harness={','.join(tasks)} cannot be read: {reason}") from None
    results: dict[str, Any] = json.loads(json.dumps(found["results"], default=str))
    return results


def harness_table(results: dict[str, Any]) -> str:
    rows = []
    for task, measured in results.items():
        for name, value in measured.items():
            if isinstance(value, float) and "_stderr" not in name:
                error = measured.get(name.replace(",", "_stderr,", 1))
                spread = f" ± {error:.4f}" if isinstance(error, float) else ""
                rows.append(f"{task}: {name.split(',')[0]} {value:.4f}{spread}")
    return "\n".join(rows)
