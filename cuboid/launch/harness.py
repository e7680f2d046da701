"""A model for lm-evaluation-harness, the package lm_eval: its tasks on any layout.

    from lm_eval import simple_evaluate
    simple_evaluate(CuboidModel(find_target("runs/demo"), parse_layout("tp=2")), tasks=["hellaswag"])

Every kind of request starts the ranks once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows

from cuboid.errors import UserError
from cuboid.generate.batch import Request
from cuboid.generate.evaluation import Score, pair_request
from cuboid.generate.prompts import Prompt, Texts, longest, make_requests
from cuboid.generate.target import Target
from cuboid.launch.generation import start_generation, start_scoring
from cuboid.spec.generation import GenerationSpec, SamplingSpec
from cuboid.spec.layout import Layout

SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What a task may say of how tokens are drawn; of the rest, what follows means something here."""
OTHERS = ("until", "max_gen_toks", "do_sample")
MOST = 256
"""Tokens of an answer whose task does not say how long it may be; the harness has the same number for models."""


class CuboidModel(LM):  # type: ignore[misc]
    def __init__(
        self,
        target: Target,
        layout: Layout,
        batch: int = 8,
        precision: str | None = None,
        device: str = "auto",
        backend: str = "auto",
        oversubscribe: bool = False,
    ) -> None:
        super().__init__()
        if not target.words.tokenizer:
            raise UserError("the model has no tokenizer for text; use --tokenizer byte or --tokenizer FOLDER")
        self._target, self._layout, self._batch = target, layout, batch
        self._precision, self._on, self._backend = precision or target.precision, device, backend
        self._oversubscribe = oversubscribe

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Of each continuation after its context; what does not fit into the model is cut at its beginning."""
        made = [self._pair(number, *request.args) for number, request in enumerate(requests)]
        return [(score.likelihood, score.likeliest) for score in self._scores(made)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Of each whole text, in windows as the harness cuts them."""
        made: list[Request] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = list(self._target.words.encode(request.args[0]))
            prefix = tokens.pop(0) if self._target.words.begins else self._beginning()
            for given, labels in get_rolling_token_windows(tokens, prefix, self._target.model.max_positions, 1):
                made.append(Request(len(made), tuple(given), labels=tuple(labels)))
                owners.append(owner)
        found = [0.0] * len(requests)
        for owner, score in zip(owners, self._scores(made), strict=True):
            found[owner] += score.likelihood
        return found

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Requests that ask for the same kind of sampling go together."""
        groups: dict[SamplingSpec, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[sampling_of(request.args[1])].append(number)
        found: dict[int, str] = {}
        for sampling, numbers in groups.items():
            most = max(1, self._target.model.max_positions - sampling.max_tokens)
            words = self._target.words
            prompts = [Prompt(number, "", words.encode(requests[number].args[0])[-most:]) for number in numbers]
            made = make_requests(prompts, sampling, self._target.model)

            def keep(row: dict[str, Any]) -> None:
                found[row["index"]] = row["text"]

            texts = Texts(prompts, words, sampling.stop, lambda *_: None, keep)
            spec = self._spec(made, longest(made))
            start_generation(spec, made, sampling, words, texts.hear, oversubscribe=self._oversubscribe)
        return [found[number] for number in range(len(requests))]

    def _pair(self, number: int, context: str, continuation: str) -> Request:
        whole = pair_request(number, context, continuation, self._target.words)
        if not context and not self._target.words.begins:
            tokens = self._target.words.encode(continuation)
            whole = Request(number, (self._beginning(), *tokens[:-1]), labels=tokens)
        most = self._target.model.max_positions
        return Request(number, whole.tokens[-most:], labels=whole.labels[-most:])

    def _beginning(self) -> int:
        """The token that stands before a text which nothing precedes."""
        if not self._target.words.ends:
            raise UserError("the tokenizer has no token that ends a text, which would stand before one; use another")
        return self._target.words.ends[0]

    def _scores(self, requests: Sequence[Request]) -> list[Score]:
        if not requests:
            return []
        spec = self._spec(requests, max(len(request.tokens) for request in requests))
        return start_scoring(spec, requests, oversubscribe=self._oversubscribe)

    def _spec(self, requests: Sequence[Request], length: int) -> GenerationSpec:
        return GenerationSpec(
            model=self._target.model,
            layout=self._layout,
            weights=self._target.weights,
            precision=self._precision,  # type: ignore[arg-type]
            device=self._on,  # type: ignore[arg-type]
            backend=self._backend,  # type: ignore[arg-type]
            slots=min(self._batch, -(-len(requests) // self._layout.dp)),
            length=length,
        )


def sampling_of(wishes: dict[str, Any]) -> SamplingSpec:
    """What a task's generation_kwargs ask for."""
    unknown = sorted(set(wishes) - {*SAMPLED, *OTHERS})
    if unknown:
        raise UserError(f"generation_kwargs has {unknown[0]}; use {', '.join((*OTHERS, *SAMPLED))}")
    until = wishes.get("until") or []
    stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
    takes: dict[str, Callable[[Any], Any]] = {name: int if name == "top_k" else float for name in SAMPLED}
    drawn = {name: takes[name](wishes[name]) for name in SAMPLED if wishes.get(name) is not None}
    if not wishes.get("do_sample", drawn.get("temperature", 0) > 0):
        drawn["temperature"] = 0.0
    elif "temperature" not in drawn:
        drawn["temperature"] = 1.0
    return SamplingSpec(max_tokens=int(wishes.get("max_gen_toks", MOST)), stop=stop, **drawn)
