"""The transformer: an embedding, blocks, and a head. (tokens, labels) in, the loss out, summed over
all tokens whose label counts.

Activations are (batch · length, hidden) throughout: everything but attention treats tokens alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from cuboid.kernels.precision import wide
from cuboid.model.attention import Attention
from cuboid.model.batch import IGNORED, Further
from cuboid.model.dropout import ResidualDropout, residual_dropout
from cuboid.model.feed_forward import FeedForward
from cuboid.model.linear import CappedLinear, ColumnLinear, Linear, Norm, Table, VocabularyEmbedding
from cuboid.model.load_balancing import Balance
from cuboid.model.mla import MultiLatentAttention
from cuboid.model.moe import MoE
from cuboid.model.rope import Positions, make_positions
from cuboid.spec.model import ModelSpec
from cuboid.spec.sharding import REPLICATED, VOCABULARY, Split


class Embedding(nn.Module):
    """Token embedding, plus learned positions where the model has them."""

    sharding: Mapping[str, Split] = {"positions.weight": REPLICATED}

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.tokens = VocabularyEmbedding(model.vocab, model.hidden)
        learned = model.positions == "learned"
        self.positions = Table(model.max_positions, model.hidden) if learned else None
        self.scale = model.embedding_scale
        self.dropout: ResidualDropout | None = None

    def forward(self, tokens: Tensor, positions: Positions) -> Tensor:
        """tokens: (batch, length) → (batch · length, hidden)."""
        x = scaled(self.tokens(tokens.flatten()), self.scale)
        if self.positions is not None:
            x = x + self.positions(positions.index.expand_as(tokens).flatten())
        return x if self.dropout is None else self.dropout(x, positions.dropout)


def scaled(x: Tensor, scale: float) -> Tensor:
    """Embedded tokens, rounded as transformers does."""
    return x if scale == 1.0 else x * torch.tensor(scale).to(x.dtype).item()


AddNorm = Callable[[Norm, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""(residual, block output to add or None) → (new residual, its norm)."""


def add_norm(norm: Norm, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x if added is None else x + added
    return x, norm(x)


class Block(nn.Module):
    sharding: Mapping[str, Split] = {
        f"{part}{kind}.*": REPLICATED for part in ("attention", "feed_forward") for kind in ("_norm", "_post_norm")
    }

    def __init__(self, model: ModelSpec, layer: int) -> None:
        super().__init__()

        def norm(exists: bool) -> Norm | None:
            return Norm(model, model.hidden) if exists else None

        before, after = model.norms != "after", model.norms != "before"
        self.attention_norm = norm(before)
        self.attention: Attention | MultiLatentAttention = (
            Attention(model, layer) if model.latent is None else MultiLatentAttention(model)
        )
        self.attention_post_norm = norm(after)
        self.feed_forward_norm = norm(before)
        routed = model.has_experts(layer)
        self.feed_forward: MoE | FeedForward = MoE(model) if routed else FeedForward(model, model.ffn)
        self.feed_forward_post_norm = norm(after)
        self.attention_dropout: ResidualDropout | None = None
        self.feed_forward_dropout: ResidualDropout | None = None
        self.add_norm: AddNorm = add_norm

    def forward(self, x: Tensor, positions: Positions) -> Tensor:
        x, normed = self.attend(x, positions)
        return self.finish(x, self.feed_forward(normed, positions), positions)

    def attend(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and the input of the feed-forward block."""
        normed = x
        if self.attention_norm is not None:
            x, normed = self.add_norm(self.attention_norm, x, None)
        made = self.attention(normed, positions)
        if self.attention_post_norm is not None:
            made = self.attention_post_norm(made)
        if self.attention_dropout is not None:
            made = self.attention_dropout(made, positions.dropout)
        if self.feed_forward_norm is not None:
            return self.add_norm(self.feed_forward_norm, x, made)
        x = x + made
        return x, x

    def finish(self, x: Tensor, made: Tensor, positions: Positions) -> Tensor:
        """The residual stream with what the feed-forward block made."""
        if self.feed_forward_post_norm is not None:
            made = self.feed_forward_post_norm(made)
        if self.feed_forward_dropout is not None:
            made = self.feed_forward_dropout(made, positions.dropout)
        return x + made


def drop_in(module: Embedding | Block, prefix: str, rate: float, seed: int, device: torch.device) -> None:
    """Let an embedding, or a block, drop what it adds to the residual stream. `prefix`: its name in the model."""
    if isinstance(module, Embedding):
        module.dropout = residual_dropout(rate, prefix, seed, device)
        return
    module.attention_dropout = residual_dropout(rate, f"{prefix}.attention", seed, device)
    module.feed_forward_dropout = residual_dropout(rate, f"{prefix}.feed_forward", seed, device)


class Prediction(Block):
    """A prediction layer: a block that reads, of each token, what a head read of it and the embedding of a further
    token. The head reads what it returns.

    What it begins with is behind the norm of the head, as in Megatron-LM and in the engines that serve DeepSeek-V3."""

    sharding: Mapping[str, Split] = {
        **Block.sharding,
        **{f"{name}_norm.*": REPLICATED for name in ("embedding", "hidden", "head", "final")},
        # As what leads to latents is: with sequence parallelism each rank has tokens of its own.
        "projection.*": REPLICATED,
    }

    def __init__(self, model: ModelSpec, layer: int) -> None:
        super().__init__(model, layer)
        self.tokens = VocabularyEmbedding(model.vocab, model.hidden)
        self.scale = model.embedding_scale
        self.embedding_norm, self.hidden_norm = Norm(model, model.hidden), Norm(model, model.hidden)
        self.projection = Linear(2 * model.hidden, model.hidden, bias=False)
        self.head_norm = Norm(model, model.hidden)
        self.final_norm: Norm
        """That of the head, where a pipeline has it in the first of these layers."""

    def join(self, x: Tensor, tokens: Tensor) -> Tensor:
        """What the block reads. x: (batch · length, hidden); tokens: the further ones, (batch, length)."""
        embedded = self.embedding_norm(scaled(self.tokens(tokens.flatten()), self.scale))
        return self.projection(torch.cat((embedded, self.hidden_norm(x)), -1))

    def predict(self, x: Tensor, tokens: Tensor, positions: Positions) -> Tensor:
        """What the head reads."""
        return self.head_norm(self(self.join(x, tokens), positions))


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of the tokens whose label counts, in float32 or better."""
    return functional.cross_entropy(logits.to(wide(logits.dtype)), labels, reduction="sum", ignore_index=IGNORED)


class Head(nn.Module):
    """Final norm, matmul with the vocabulary, and the loss."""

    sharding: Mapping[str, Split] = {"norm.*": REPLICATED}

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = Norm(model, model.hidden)
        self.cap = model.logit_softcap
        self.output = (
            CappedLinear(model.hidden, model.vocab, VOCABULARY, self.cap)
            if self.cap
            else ColumnLinear(model.hidden, model.vocab, False, VOCABULARY)
        )
        self.summed_loss: Callable[[Tensor, Tensor], Tensor] = summed_loss

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.summed_loss(self(x), labels.flatten())


class Transformer(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.model = model
        with torch.random.fork_rng(devices=[]):  # layers draw numbers that `initialize` replaces
            self.embedding = Embedding(model)
            kinds: list[type[Block]] = [Block] * model.layers + [Prediction] * model.prediction_layers
            self.layers = nn.ModuleDict({str(index): kind(model, index) for index, kind in enumerate(kinds)})
            self.head = Head(model)
        if model.tie_embeddings:
            self.head.output.weight = self.embedding.tokens.weight
        for layer in self.predictions:
            layer.tokens.weight = self.embedding.tokens.weight

    @property
    def predictions(self) -> list[Prediction]:
        return [layer for layer in self.layers.values() if isinstance(layer, Prediction)]

    def drop(self, rate: float, seed: int) -> None:
        """What blocks and embedding add to the residual stream, of tokens whose positions say what to draw from."""
        for name, module in self.named_modules():
            if isinstance(module, Embedding | Block):
                drop_in(module, name, rate, seed, torch.device("cpu"))

    def balance_with(self, balance: Balance) -> None:
        """Let the routers' auxiliary losses take part in every backward pass, and count what they do."""
        routers = [block.feed_forward.router for block in self.layers.values() if isinstance(block.feed_forward, MoE)]
        for row, router in enumerate(routers):
            router.balance, router.row = balance, row

    def hidden_states(self, tokens: Tensor, positions: Positions | None = None) -> Tensor:
        """`positions`: without them, every sequence is one document."""
        weight = self.head.norm.weight
        positions = positions or make_positions(self.model, tokens.shape[1], weight.dtype, weight.device)
        x = self.embedding(tokens, positions)
        for block in self.layers.values():
            if not isinstance(block, Prediction):
                x = block(x, positions)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, length) → logits (batch, length, vocab)."""
        return self.head(self.hidden_states(tokens)).unflatten(0, tokens.shape)

    def loss(self, tokens: Tensor, labels: Tensor, positions: Positions | None = None) -> Tensor:
        """Summed over the tokens whose label counts; labels: (batch, length), IGNORED where a token does not."""
        return self.head.loss(self.hidden_states(tokens, positions), labels)

    def prediction_losses(self, x: Tensor, further: list[Further], positions: Positions | None = None) -> list[Tensor]:
        """Of each prediction layer, summed like `loss`. x: the hidden states; `further`: what they read and predict."""
        weight = self.head.norm.weight
        positions = positions or make_positions(self.model, further[0].tokens.shape[1], weight.dtype, weight.device)
        x, losses = self.head.norm(x), []
        for layer, each in zip(self.predictions, further, strict=True):
            x = layer.predict(x, each.tokens, positions)
            losses.append(self.head.summed_loss(self.head.output(x), each.labels.flatten()))
        return losses
