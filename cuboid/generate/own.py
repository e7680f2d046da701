"""Generation from models of one's own: the whole text so far goes through the model for every token. That needs no
knowledge of its blocks, and takes as many times longer as the text has tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cuboid.checkpoint.weights import load_checkpoint
from cuboid.errors import UserError
from cuboid.generate.batch import Ending, Event, Request
from cuboid.generate.detokenizer import Words
from cuboid.generate.evaluation import Score
from cuboid.generate.sampling import choose, uniform
from cuboid.model.custom import Model, WholeModel
from cuboid.parallel.parallelize import DTYPES
from cuboid.spec.generation import GenerationSpec, SamplingSpec
from cuboid.spec.plugin import PythonModelSpec


def check_logits(model: PythonModelSpec) -> None:
    """Refuse a model whose head does not say which token is next."""
    built = model.built
    assert isinstance(built, Model)
    with torch.device("meta"):
        head = built.make("head")
    if not hasattr(head, "logits"):
        raise UserError(
            f"model={model.name} does not say which token is next: its head, {type(head).__name__}, has no "
            "`logits(x, batch)`; add it, or read the weights with cuboid.load_checkpoint"
        )


class OwnGenerator:
    """One of `spec.layout.dp` replicas, each of which has the whole model."""

    def __init__(self, spec: GenerationSpec, rank: int, device: torch.device) -> None:
        assert isinstance(spec.model, PythonModelSpec)
        built = spec.model.built
        assert isinstance(built, Model)
        self._replica, self._replicas, self._device = rank, spec.layout.dp, device
        self._vocabulary = spec.model.vocab
        self._model = WholeModel(built, 0)
        parameters = dict(self._model.named_parameters())
        for name, tensor in load_checkpoint(spec.weights).items():
            parameters[name].data.copy_(tensor)
        self._model.to(device, DTYPES[spec.precision])

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        """(tokens, vocabulary), in float32 or better."""
        given = torch.tensor([list(tokens)], device=self._device)
        batch = {"tokens": given, "labels": torch.zeros_like(given)}
        x = self._model.embedding(batch)
        for block in self._model.layers.values():
            x = block(x, batch)
        head: Any = self._model.head
        logits: Tensor = head.logits(x, batch)[0, :, : self._vocabulary]
        return logits.float() if logits.element_size() < 4 else logits

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: SamplingSpec, words: Words, heard: Callable[[list[Event]], None]
    ) -> None:
        for request in requests[self._replica :: self._replicas]:
            tokens = list(request.tokens)
            for place in range(request.room):
                numbers = [uniform(sampling.seed, request.number, len(tokens))] if sampling.temperature else []
                (token,) = choose(self._logits(tokens)[-1:], sampling, numbers, [tokens])
                tokens.append(token)
                written = tokens[len(request.tokens) :]
                ending: Ending = "length" if place + 1 == request.room else ""
                if token in words.ends:
                    ending = "end"
                elif sampling.stop and words.stops(written, sampling.stop):
                    ending = "stop"
                heard([Event(request.number, token, ending)])
                if ending:
                    break

    @torch.inference_mode()
    def score(self, requests: Sequence[Request], heard: Callable[[list[Score]], None]) -> None:
        for request in requests[self._replica :: self._replicas]:
            labels = torch.tensor(request.labels, device=self._device)
            rows = self._logits(request.tokens)[-len(labels) :].double()
            likelihood = (rows.gather(1, labels.unsqueeze(1)).squeeze(1) - rows.logsumexp(1)).sum().item()
            likeliest = bool((rows.argmax(1) == labels).all())
            heard([Score(request.number, len(labels), likelihood, likeliest)])
