"""FX pass that makes the matmuls beside collectives match Inductor's micro-pipeline-TP patterns, which know bare
matmuls only.

The input of a region feeds several matmuls (QKV; gate and up), so its gradient is a sum of matmuls. It becomes one:
a @ b + c @ d = [a c] @ [b; d], which sums in float32, where adding two results rounds each. A bias is added after the
matmul, not within it."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
_ARRIVAL = torch.ops._c10d_functional.wait_tensor.default
_aten = torch.ops.aten
_MM, _BIASED, _ADD = _aten.mm.default, _aten.addmm.default, _aten.add.Tensor


class MicroPipelinePass(CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        for scatter in graph.find_nodes(op="call_function", target=_SCATTER):
            _join(graph, scatter)
        for biased in graph.find_nodes(op="call_function", target=_BIASED):
            _, left, _ = biased.args
            if left.target is _ARRIVAL and not biased.kwargs:
                _add_later(graph, biased)

    def uuid(self) -> bytes:
        """Compiled graphs are kept for as long as this file stays as it is."""
        return get_hash_for_files((__file__,))


def _join(graph: Graph, scatter: Node) -> None:
    total: Any = scatter.args[0]
    matmuls = _summands(total)
    if len(matmuls) < 2:
        return
    with graph.inserting_before(total):
        # a·b + c·d = [a c]·[b; d]: one matmul, which Inductor's pass can take apart by rows while they leave.
        left, right = (
            _call(graph, _aten.cat.default, [matmul.args[side] for matmul in matmuls], 1 - side) for side in (0, 1)
        )
        scatter.replace_input_with(total, _call(graph, _MM, left, right))
    _erase(graph, total)


def _summands(total: Node) -> list[Node]:
    """The matmuls whose sum a node is; none if anything else is in it, or anybody else needs a part of it."""
    if len(total.users) > 1 or total.kwargs:
        return []
    if total.target is _MM:
        return [total]
    if total.target is not _ADD:
        return []
    parts = [_summands(part) if isinstance(part, Node) else [] for part in total.args]
    return [matmul for part in parts for matmul in part] if all(parts) else []


def _add_later(graph: Graph, biased: Node) -> None:
    bias, left, right = biased.args
    with graph.inserting_before(biased):
        # In three dimensions: a sum in two the compiler would put back into its matmul.
        matmul = _call(graph, _aten.unsqueeze.default, _call(graph, _MM, left, right), 0)
        biased.replace_all_uses_with(_call(graph, _aten.squeeze.dim, _call(graph, _ADD, matmul, bias), 0))
    graph.erase_node(biased)


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda argument: argument.meta["val"]))
    return node


def _erase(graph: Graph, total: Node) -> None:
    parts = total.args if total.target is _ADD else ()
    graph.erase_node(total)
    for part in parts:
        if isinstance(part, Node):
            _erase(graph, part)
