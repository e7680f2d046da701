"""A model of one's own: ordinary PyTorch modules, and how each of their parameters is split over tensor ranks.

    def build(hidden: int = 64) -> Model:
        return Model(
            embedding=lambda: Embedding(hidden),        # forward(batch) -> x
            block=lambda layer: Block(hidden),          # forward(x, batch) -> x
            layers=4,
            head=lambda: Head(hidden),                  # forward(x, batch) -> sum of losses
            flow=("batch", "sequence", hidden),         # the shape of x
        )

A module is built with the random generator seeded by the run's seed and the module's name, so its own initialisation
gives the same weights on any layout. Nothing else may draw random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from cuboid.errors import UserError
from cuboid.model.batch import IGNORED
from cuboid.model.dropout import Dropout, name_dropouts
from cuboid.model.linear import ColumnLinear, declared_split
from cuboid.model.load_balancing import Balance
from cuboid.model.router import Router
from cuboid.model.transformer import summed_loss
from cuboid.spec.mixture import MixtureSpec
from cuboid.spec.plugin import SegmentRun
from cuboid.spec.sharding import EXPERT, REPLICATED, TIED, VOCABULARY, Declared, ShardingRank, Split

if TYPE_CHECKING:
    from cuboid.model.segment_costs import SegmentCosts

Batch = Mapping[str, Tensor]
"""What the data set gives, a micro-batch at a time: name -> (micro-batch, …)."""
Flow = Tensor | tuple[Tensor, ...]
Shape = tuple[int | Literal["batch", "sequence"], ...]


class VocabularyLoss(ColumnLinear):
    """(hidden states, labels) -> summed cross-entropy over a vocabulary that is split over tensor ranks. Labels of -100
    do not count."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__(hidden, vocabulary, False, VOCABULARY)
        self.summed_loss: Callable[[Tensor, Tensor], Tensor] = summed_loss

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=min(self.in_features**-0.5, 16 / self.in_features))

    def logits(self, x: Tensor) -> Tensor:
        """Of this rank's part of the vocabulary."""
        return super().forward(x)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.summed_loss(self.logits(x).flatten(0, -2), labels.flatten())


def counted_labels(batch: Batch) -> Tensor:
    """How many labels count: the default of `Model.count`."""
    return (batch["labels"] != IGNORED).sum()


def _told(value: Any) -> str:
    """An attribute in words. Functions are told by their names and what they close over, other objects by their
    type."""
    if isinstance(value, str | int | float | bool | tuple | list | dict | torch.dtype | None):
        return repr(value)
    held = [_told(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ()]
    return f"{getattr(value, '__qualname__', type(value).__qualname__)} {held}"


@dataclass(frozen=True)
class Model:
    """What `model.python` returns."""

    embedding: Callable[[], nn.Module]
    block: Callable[[int], nn.Module]
    layers: int
    head: Callable[[], nn.Module]
    flow: Shape | Sequence[Shape]
    """The shape of what goes from block to block, or several of them: x is then a tuple. "batch" is the micro-batch,
    "sequence" is training.sequence."""
    count: Callable[[Batch], Tensor] = counted_labels
    """How many losses the head sums for a micro-batch. The loss of a step is the sum of all losses over the sum of
    these, over the whole batch: the same on any layout."""
    data: Callable[[], Any] | None = None
    """A data set of its own: has `len()`, and a dict of tensors at each index; or a stream, which can be iterated."""
    evaluation_data: Callable[[], Any] | None = None
    """Another to evaluate on: `data.validation = "model"`."""
    vocab: int = 0
    """Tokens there are, if it reads tokens: a first loss far from ln(vocab) is then warned of."""
    tied: tuple[str, str] | None = None
    """A parameter of the embedding and one of the head that are one: ("embedding.tokens.weight",
    "head.output.weight"). It is called `embedding.tokens.weight` in checkpoints, whatever its names are."""
    initial: Callable[[str, tuple[int, ...], int], Tensor | None] | None = None
    """(name, full shape, seed) -> the first weights of a parameter; without it, and where it returns None, modules
    initialise themselves."""
    exported_name: Callable[[str], str] | None = None
    """A parameter's name -> its name in a Hugging Face folder, for a model that has one."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise UserError(f"Model(layers={self.layers}) has no block; use layers=1 or more")

    @property
    def tie_embeddings(self) -> bool:
        return self.tied is not None

    @property
    def has_sequence(self) -> bool:
        """Whether `training.sequence` says how long its samples are."""
        return self.flow_shapes(1, 1) != self.flow_shapes(1, 2) or self.data is None

    def called(self, name: str) -> str:
        """The name by which engine and checkpoints know a parameter."""
        return TIED if self.tied is not None and name in self.tied else name

    def make(self, prefix: str) -> nn.Module:
        if prefix == "embedding":
            return self.embedding()
        return self.head() if prefix == "head" else self.block(int(prefix.partition(".")[2]))

    def segment(self, prefix: str, seed: int) -> nn.Module:
        """`embedding`, `layers.3` or `head` with its first weights, on the CPU, whatever draws random numbers else."""
        with torch.random.fork_rng(devices=[]):
            digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            module = self.make(prefix)
        self._refuse(prefix, module)
        name_dropouts(module, prefix, seed)
        if self.initial is not None:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    drawn = self.initial(self.called(f"{prefix}.{name}"), tuple(parameter.shape), seed)
                    if drawn is not None:
                        parameter.copy_(drawn)
        return module

    def _refuse(self, prefix: str, module: nn.Module) -> None:
        for name, child in module.named_modules():
            if getattr(child, "p", 0) and type(child).__name__.startswith(("Dropout", "AlphaDropout")):
                raise UserError(
                    f"{prefix}.{name} drops {child.p:g} of its inputs: such random numbers differ with the layout; "
                    f"use cuboid.Dropout({child.p:g}), called with (x, batch), or a dropout of 0"
                )
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                raise UserError(
                    f"{prefix}.{name} normalises over the micro-batch, which differs with the layout; use a norm over "
                    "channels"
                )

    @property
    def prefixes(self) -> list[str]:
        return ["embedding", *(f"layers.{layer}" for layer in range(self.layers)), "head"]

    @cached_property
    def shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Prefix -> full shapes by the name inside it."""
        return {prefix: {name: shape for name, shape, _ in declared} for prefix, declared in self._declarations.items()}

    @cached_property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """By the name in the whole model; a tied one once."""
        return {
            self.called(f"{prefix}.{name}"): shape
            for prefix, shapes in self.shapes.items()
            for name, shape in shapes.items()
        }

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.parameter_shapes.values())

    @cached_property
    def drops(self) -> bool:
        """Whether some module of it is a `Dropout`."""
        return any(drops for _, _, drops in self._segments.values())

    @cached_property
    def _declarations(self) -> dict[str, list[tuple[str, tuple[int, ...], Split | None]]]:
        return {prefix: declared for prefix, (declared, *_) in self._segments.items()}

    @cached_property
    def _segments(self) -> dict[str, tuple[list[tuple[str, tuple[int, ...], Split | None]], list[MixtureSpec], bool]]:
        """Prefix -> its parameters, what its routers say, and whether it has a `Dropout`."""
        found = {}
        for prefix in self.prefixes:
            with torch.device("meta"):
                module = self.make(prefix)
            held = module.named_parameters()
            declared = [(name, tuple(each.shape), declared_split(module, name)) for name, each in held]
            drops = any(isinstance(child, Dropout) and child.rate > 0 for child in module.modules())
            found[prefix] = declared, [child.mixture for child in module.modules() if isinstance(child, Router)], drops
        return found

    def declared(self, prefix: str) -> dict[str, Declared]:
        """The parameters of a segment by the name in the whole model; what says nothing is whole on every rank."""
        return {
            self.called(f"{prefix}.{name}"): Declared(shape, split or REPLICATED)
            for name, shape, split in self._declarations[prefix]
        }

    def segment_parameters(self, prefix: str) -> int:
        """How many there are in a segment."""
        return sum(torch.Size(shape).numel() for shape in self.shapes[prefix].values())

    @property
    def experts(self) -> dict[str, int]:
        """Parameters that are declared as EXPERT, and how many experts each holds."""
        return {
            f"{prefix}.{name}": shape[0]
            for prefix, declared in self._declarations.items()
            for name, shape, split in declared
            if split == EXPERT
        }

    @cached_property
    def mixture(self) -> MixtureSpec | None:
        """What its routers say, where it has some: layers before the first one are without, the others all alike."""
        found = [self._mixture_of(layer) for layer in range(self.layers)]
        first = next((layer for layer, mixture in enumerate(found) if mixture is not None), self.layers)
        if first == self.layers:
            return None
        for layer in range(first + 1, self.layers):
            if found[layer] != found[first]:
                raise UserError(
                    f"layers.{layer} has another Router than layers.{first}, or none; use the same in every layer from "
                    "the first that has one"
                )
        mixture = found[first]
        assert mixture is not None
        return replace(mixture, first_dense_layers=first)

    def _mixture_of(self, layer: int) -> MixtureSpec | None:
        mixtures = self._segments[f"layers.{layer}"][1]
        if len(mixtures) > 1:
            raise UserError(f"layers.{layer} has {len(mixtures)} Routers; use one in a block")
        return mixtures[0] if mixtures else None

    def check_tensor_parallel(self, ranks: int) -> None:
        """Every parameter says how it is split, and can be."""
        for prefix in self.prefixes:
            for name, shape, declared in self._declarations[prefix]:
                if declared is None:
                    raise UserError(
                        f"tp={ranks} needs to know how {prefix}.{name} is split; say so in the `sharding` of a module "
                        f'around it, as {{"{name}": REPLICATED}}, or use tp=1'
                    )
                if declared.kind == "heads" and declared.heads % ranks:
                    raise UserError(
                        f"tp={ranks} does not divide the {declared.heads} heads of {prefix}.{name}; use another tp"
                    )
                declared.slice_of(f"{prefix}.{name}", shape, ShardingRank(ranks))

    def costs(self, prefix: str, run: SegmentRun) -> SegmentCosts:
        """Of a segment. Those cost the same whose modules, their parameters and plain attributes are alike."""
        if all(split != EXPERT for _, _, split in self._declarations[prefix]):
            run = replace(run, expert=1)
        key = (self._descriptions[prefix], run)
        if key not in self._known_costs:
            from cuboid.model.segment_costs import segment_costs

            self._known_costs[key] = segment_costs(self, prefix, run)
        return self._known_costs[key]

    def loops(self, prefix: str) -> bool:
        """Whether a segment does more operations, not larger ones, for a longer sequence. False also where it cannot be
        run on tensors without contents."""
        try:
            short, long = (self.costs(prefix, SegmentRun(1, 1, length, "float32")) for length in (8, 16))
        except UserError:
            return False
        return len(long.forward) > len(short.forward)

    def estimated_costs(self, prefix: str, run: SegmentRun) -> SegmentCosts:
        """As `costs`; of large micro-batches what follows from those of small ones, so that a search is quick."""
        from cuboid.model.segment_costs import MEASURED

        small, large = MEASURED
        if run.micro_batch <= large:
            return self.costs(prefix, run)
        one, two = (self.costs(prefix, replace(run, micro_batch=size)) for size in MEASURED)
        if one.shape != two.shape:
            return self.costs(prefix, run)
        return one.grown(two, (run.micro_batch - large) / (large - small))

    @cached_property
    def _descriptions(self) -> dict[str, str]:
        """Prefix -> what tells segments apart that cost differently."""
        found = {}
        for prefix in self.prefixes:
            with torch.device("meta"):
                module = self.make(prefix)
            attributes = {
                (path, name): _told(value)
                for path, child in module.named_modules()
                for name, value in vars(child).items()
                if not name.startswith("_")
            }
            found[prefix] = f"{module!r} {self.shapes[prefix]} {attributes}"
        return found

    @cached_property
    def _known_costs(self) -> dict[Any, SegmentCosts]:
        return {}

    def flow_shapes(self, micro_batch: int, sequence: int) -> list[tuple[int, ...]]:
        several = bool(self.flow) and not isinstance(self.flow[0], int | str)
        named: dict[object, int] = {"batch": micro_batch, "sequence": sequence}
        shapes: Sequence[Any] = self.flow if several else [self.flow]
        return [tuple(named.get(size, size) for size in shape) for shape in shapes]


class WholeModel(nn.Module):
    """All of it on one device: what every layout must equal."""

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        self.model = model
        self.embedding = model.segment("embedding", seed)
        self.layers = nn.ModuleDict(
            {str(layer): model.segment(f"layers.{layer}", seed) for layer in range(model.layers)}
        )
        self.head = model.segment("head", seed)
        if model.tied is not None:
            embedded, head = model.tied
            owner, _, name = head.rpartition(".")
            setattr(self.get_submodule(owner), name, self.get_parameter(embedded))

    def named_parameters(self, *given: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names that the engine knows."""
        for name, parameter in super().named_parameters(*given, **options):
            yield self.model.called(name), parameter

    def balance_with(self, balance: Balance) -> None:
        """Let the routers' auxiliary losses take part in every backward pass, and count what they do."""
        for layer, block in self.layers.items():
            for child in block.modules():
                if isinstance(child, Router):
                    child.balance, child.row = balance, int(layer) - balance.mixture.first_dense_layers

    def forward(self, batch: Batch) -> Tensor:
        """The sum of losses."""
        x = self.embedding(batch)
        for block in self.layers.values():
            x = block(x, batch)
        loss: Tensor = self.head(x, batch)
        return loss
