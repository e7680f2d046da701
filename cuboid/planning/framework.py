"""The decision framework, computed: does a layer fit an accelerator, does the model fit a node, what is left for data.

States by the textbook rule for Adam in mixed precision: 2 B of weights, 2 B of gradients and 12 B of optimizer state
per parameter. Gigabytes are decimal here, as in the papers.
"""

from dataclasses import dataclass

from cuboid.cost.inputs import Jobs, Shape
from cuboid.cost.memory import kept_per_layer
from cuboid.planning.question import Question
from cuboid.spec.layout import Layout

WEIGHTS, GRADIENTS, OPTIMIZER = 2, 2, 12
STATES = WEIGHTS + GRADIENTS + OPTIMIZER
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The three questions and their answers for one layout; bytes."""

    accelerator: float
    """Memory of one accelerator."""
    node_size: int
    parameters: int
    layer_parameters: int
    """Of the largest layer."""
    layer_states: float
    layer_activations: float
    """One sequence in one layer."""
    tensor_needed: int
    """Least ranks that hold a layer between them."""
    states: float
    nodes_needed: int
    """Least nodes that hold all states."""
    replica: int
    """Accelerators of one replica: tp × pp × cp."""
    replicas: int
    weights: float
    """Per rank, after tp × pp."""
    gradients: float
    optimizer: float

    @property
    def layer_fits(self) -> bool:
        """Whether one layer with its activations fits one accelerator."""
        return self.tensor_needed == 1

    @property
    def node_fits(self) -> bool:
        """Whether all states fit one node."""
        return self.nodes_needed == 1


def framework(question: Question, layout: Layout) -> Framework:
    """The framework for one layout of the question."""
    model, cluster = question.model, question.cluster
    memory = cluster.memory_gib * 2**30
    layer = max(model.layer_parameters(index) for index in (0, model.layers - 1))
    jobs = Jobs.make(global_batch=1, sequence=question.sequence, sequence_parallel=0)
    kept = max(float(value) for value in kept_per_layer(Shape.of(model), jobs, question.profile))
    layer_bytes = STATES * layer + kept
    rank = layout.tp * layout.pp
    node = min(cluster.tiers[0].size, cluster.accelerators)
    states = STATES * model.parameters
    return Framework(
        accelerator=memory,
        node_size=node,
        parameters=model.parameters,
        layer_parameters=layer,
        layer_states=STATES * layer,
        layer_activations=kept,
        tensor_needed=_least(layer_bytes, memory),
        states=states,
        nodes_needed=_least(states, node * memory),
        replica=rank * layout.cp,
        replicas=layout.dp,
        weights=WEIGHTS * model.parameters / rank,
        gradients=GRADIENTS * model.parameters / rank,
        optimizer=OPTIMIZER * model.parameters / rank,
    )


def _least(needed: float, available: float) -> int:
    return max(-(-int(needed) // int(available)), 1)


def decision_lines(found: Framework, layout: Layout, cluster: str) -> list[str]:
    """The three steps as sentences a reader can check by hand."""
    layer = (
        f"1. One layer: {STATES} bytes × {found.layer_parameters / GB:.4g} billion parameters = "
        f"{found.layer_states / GB:.4g} GB of states + {found.layer_activations / GB:.3g} GB of activations for one "
        f"sequence, on {found.accelerator / GB:.4g} GB: "
    )
    layer += (
        "fits, so tensor parallelism is a choice"
        if found.layer_fits
        else f"does not fit, so tensor parallelism must split it at least {found.tensor_needed} ways"
    )
    node = (
        f"2. The model: {STATES} bytes × {found.parameters / GB:.4g} billion parameters = "
        f"{found.states / 1e12:.4g} TB of states, on a node of {found.node_size} × {found.accelerator / GB:.4g} GB = "
        f"{found.node_size * found.accelerator / 1e12:.4g} TB: "
    )
    node += (
        "fits, so pipeline parallelism is a choice"
        if found.node_fits
        else f"does not fit; at least {found.nodes_needed} nodes must share it, by pipeline stages or by ZeRO"
    )
    context = f" × cp={layout.cp}" if layout.cp > 1 else ""
    data = (
        f"3. The rest: tp={layout.tp} × pp={layout.pp}{context} = {found.replica} accelerators hold one replica, and "
        f"{cluster} has room for {found.replicas}, so dp={layout.dp}"
    )
    over = layout.tp * layout.pp
    states = (
        f"States per rank: {WEIGHTS}, {GRADIENTS} and {OPTIMIZER} bytes × {found.parameters / GB:.4g} billion / {over} "
        f"= {found.weights / GB:.1f} GB of weights + {found.gradients / GB:.1f} GB of gradients + "
        f"{found.optimizer / GB:.1f} GB of optimizer state (before ZeRO and rounding up of stages)"
    )
    return [layer, node, data, states]
