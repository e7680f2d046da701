"""A rewriting of graphs: sums of products, before the exchange that adds them up over ranks, as one product.

What enters a region goes into several products (query, key and value; gate and up), so that the gradient that leaves it
backwards is a sum: a @ b + c @ d = [a c] @ [b; d]. Only a product can be taken apart under the exchange; and it sums in
float32, where additions of products round each time."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

_EXCHANGE = torch.ops._c10d_functional.reduce_scatter_tensor.default
_ADD, _CAT, _MM = torch.ops.aten.add.Tensor, torch.ops.aten.cat.default, torch.ops.aten.mm.default


class JoinProducts(CustomGraphPass):
    def __call__(self, graph: Graph) -> None:
        for exchange in graph.find_nodes(op="call_function", target=_EXCHANGE):
            total = exchange.args[0]
            products = _summands(total)
            if len(products) > 1:
                with graph.inserting_before(total):
                    left = _call(graph, _CAT, [product.args[0] for product in products], 1)
                    right = _call(graph, _CAT, [product.args[1] for product in products], 0)
                    exchange.replace_input_with(total, _call(graph, _MM, left, right))
                _erase(graph, total)

    def uuid(self) -> bytes:
        """Compiled graphs are kept for as long as this file stays as it is."""
        return get_hash_for_files((__file__,))


def _summands(total: Node) -> list[Node]:
    """The products whose sum a node is; none if there is anything else in it, or anybody else needs a part of it."""
    if len(total.users) > 1 or total.kwargs:
        return []
    if total.target is _MM:
        return [total]
    if total.target is not _ADD:
        return []
    parts = [_summands(part) if isinstance(part, Node) else [] for part in total.args]
    return [product for part in parts for product in part] if all(parts) else []


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    node = graph.call_function(target, arguments)
    shapes = torch.fx.node.map_arg(arguments, lambda argument: argument.meta["val"])
    node.meta["val"] = target(*shapes)
    return node


def _erase(graph: Graph, total: Node) -> None:
    parts = total.args if total.target is _ADD else ()
    graph.erase_node(total)
    for part in parts:
        if isinstance(part, Node):
            _erase(graph, part)
