"""Text that the model writes during training, with the weights as they are, on the training's own layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cuboid.checkpoint.huggingface.folder import companions
from cuboid.console import say
from cuboid.errors import UserError
from cuboid.generate.batch import Event
from cuboid.generate.build import Builder
from cuboid.generate.detokenizer import Words, words_of
from cuboid.generate.engine import Generator
from cuboid.generate.prompts import Prompt, longest, make_prompt, make_requests
from cuboid.parallel.groups import context_group
from cuboid.parallel.parallelize import Engine
from cuboid.spec.generation import GenerationSpec, SamplingSpec, plain_layout
from cuboid.spec.run import Run

SAMPLES = "samples.jsonl"


def prompts_of(run: Run) -> tuple[list[Prompt], Words]:
    """Refuses what the model could not continue with."""
    words = words_of(companions(run).files, begins=False)
    if not words.tokenizer:
        raise UserError(f"samples.every={run.samples.every} needs text and the data has no tokenizer; use every=0")
    found = [
        make_prompt(number, text, words, run.model.vocab, f"samples.prompts[{number}]")
        for number, text in enumerate(run.samples.prompts)
    ]
    make_requests(found, sampling_of(run), run.model)
    return found, words


def sampling_of(run: Run) -> SamplingSpec:
    wishes = run.samples
    return SamplingSpec(max_tokens=wishes.max_tokens, temperature=wishes.temperature, seed=run.training.seed)


class Sampler:
    """Every rank makes one and calls the same methods in the same order."""

    def __init__(self, engine: Engine, quiet: bool) -> None:
        self._engine, self._quiet = engine, quiet
        run, groups = engine.run, engine.groups
        self._context = context_group(groups, run.layout, groups.world.index)
        self._prompts, self._words = prompts_of(run)
        self._sampling = sampling_of(run)
        self._requests = make_requests(self._prompts, self._sampling, run.model)
        self._spec = GenerationSpec(
            model=run.model,
            layout=plain_layout(run.layout),
            weights="",
            precision=run.training.weights,
            slots=-(-len(self._requests) // run.layout.dp),
            length=longest(self._requests),
        )

    def write(self, step: int) -> None:
        """The cache is there only meanwhile; so are whole parameters that ZeRO splits."""
        for unit in self._engine.units:
            unit.gather()
        texts: dict[int, list[int]] = {}

        def heard(events: list[Event]) -> None:
            for event in events:
                texts.setdefault(event.number, []).append(event.token)

        self._generator().generate(self._requests, self._sampling, self._words, heard)
        for unit in self._engine.units:
            unit.release()
        if self._engine.ledger is not None:
            self._engine.ledger.take()  # what it communicated is no part of a step
        self._record(step, texts)

    def _generator(self) -> Generator:
        engine = self._engine
        held = {name: parameter for unit in engine.units for name, parameter in unit.parameters.items()}
        builder = Builder(self._spec, engine.groups, self._context, engine.device, held)
        stages = {index: builder.stage(engine.partition[index]) for index in engine.pipeline.stages}
        rank_of_stage = tuple(engine.pipeline.schedule.stage_rank)
        return Generator(self._spec, engine.groups, self._context, stages, rank_of_stage, engine.device)

    def _record(self, step: int, texts: dict[int, list[int]]) -> None:
        world = self._engine.groups.world
        found: list[Any] = [texts]
        if world.handle is not None:
            found = [None] * world.size
            dist.all_gather_object(found, texts)
        if world.index:
            return
        whole = {number: tokens for part in found for number, tokens in part.items()}
        rows = []
        for prompt in self._prompts:
            text = self._words.decode(whole[prompt.number])
            rows.append(json.dumps({"step": step, "prompt": prompt.text, "text": text}, ensure_ascii=False) + "\n")
            if not self._quiet:
                say(f"step {step}: {prompt.text!r} → {text!r}")
        with (Path(self._engine.run.output.folder) / SAMPLES).open("a", encoding="utf-8") as file:
            file.write("".join(rows))
