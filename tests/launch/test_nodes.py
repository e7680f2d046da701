"""What the command line says of many nodes, and where a node listens."""

from __future__ import annotations

import pytest

from cuboid.errors import UserError
from cuboid.launch.network import Endpoint, Interface, find_interface, listen_if_host, parse_endpoint, reachable
from cuboid.launch.start import NodeOptions, find_nodes
from cuboid.spec.run import Run, build_run
from tests.launch.ports import free_port

HERE = "127.0.0.1:29400"


def run_on(layout: str, every: int = 2) -> Run:
    training, checkpoint = {"global_batch": 16, "sequence": 64}, {"every": every}
    return build_run({"model": "tiny-llama", "layout": layout, "training": training, "checkpoint": checkpoint})


def test_one_node_needs_no_options_and_many_the_same_ones() -> None:
    assert find_nodes(run_on("dp=8"), NodeOptions()) is None
    nodes = find_nodes(run_on("dp=8"), NodeOptions(rendezvous=HERE, nodes=4))
    assert nodes is not None and (nodes.least, nodes.most, nodes.ranks) == (4, 4, 2)
    elastic = find_nodes(run_on("dp=8"), NodeOptions(rendezvous=HERE, nodes=4, min_nodes=2, max_nodes=4))
    assert elastic is not None and (elastic.least, elastic.most, elastic.ranks) == (2, 4, 2)
    assert nodes.fingerprint(run_on("dp=8")) != elastic.fingerprint(run_on("dp=8"))
    wide = find_nodes(run_on("dp=4"), NodeOptions(rendezvous=HERE, min_nodes=1, max_nodes=4, ranks_per_node=2))
    assert wide is not None and (wide.least, wide.most, wide.ranks) == (1, 4, 2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (NodeOptions(nodes=4), "nodes=4 needs a place where nodes meet; add --rendezvous HOST:PORT"),
        (NodeOptions(min_nodes=4), "min-nodes=4 needs a place where nodes meet; add --rendezvous HOST:PORT"),
        (NodeOptions(rendezvous=HERE), f"rendezvous={HERE} needs the number of nodes; add --nodes N"),
        (NodeOptions(rendezvous="node0", nodes=4), "rendezvous=node0 does not say HOST:PORT; write it like"),
        (NodeOptions(rendezvous=":29400", nodes=4), "rendezvous=:29400 does not say HOST:PORT; write it like"),
        (NodeOptions(rendezvous="node0:http", nodes=4), "rendezvous=node0:http has no port from 1 to 65535; write"),
        (NodeOptions(rendezvous="node0:70000", nodes=4), "rendezvous=node0:70000 has no port from 1 to 65535; write"),
        (NodeOptions(rendezvous=HERE, nodes=0), "nodes=0 is not positive; use nodes=1 or more"),
        (NodeOptions(rendezvous=HERE, nodes=3), "nodes=3 do not divide the 8 ranks of dp=8,tp=1,pp=1; use nodes=2 or"),
        (
            NodeOptions(rendezvous=HERE, min_nodes=5, max_nodes=4),
            "min-nodes=5 is more than max-nodes=4; use --min-nodes 4 or less",
        ),
        (
            NodeOptions(rendezvous=HERE, nodes=4, ranks_per_node=3),
            "ranks-per-node=3 does not divide the 8 ranks of dp=8,tp=1,pp=1; use ranks-per-node=2 or",
        ),
        (
            NodeOptions(rendezvous=HERE, min_nodes=1, max_nodes=3, ranks_per_node=2),
            "dp=8,tp=1,pp=1 on 2 ranks a node takes 4 nodes, not 1 to 3; use --max-nodes 4 or another layout",
        ),
        (
            NodeOptions(rendezvous=HERE, nodes=4, interface="eth99"),
            "interface=eth99 is no interface or address of this machine; use --interface",
        ),
    ],
)
def test_what_cannot_work_is_refused(options: NodeOptions, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        find_nodes(run_on("dp=8"), options)
    assert str(refused.value).startswith(sentence)


def test_fewer_nodes_need_checkpoints() -> None:
    assert find_nodes(run_on("dp=8", every=0), NodeOptions(rendezvous=HERE, nodes=4)) is not None
    with pytest.raises(
        UserError, match=r"^min-nodes=2 has no checkpoints to resume from with fewer nodes; use checkpo"
    ):
        find_nodes(run_on("dp=8", every=0), NodeOptions(rendezvous=HERE, nodes=4, min_nodes=2))


def test_an_interface_has_a_name_and_an_address() -> None:
    assert parse_endpoint("[::1]:80") == Endpoint("::1", 80)
    for asked in (None, "lo", "127.0.0.1"):
        found = find_interface(asked, Endpoint("localhost", 29400))
        assert (found.name, found.address) in (("lo", "127.0.0.1"), ("lo", "::1"))


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "x", "9" * 5000])
def test_a_port_is_a_number_up_to_65535(port: str) -> None:
    with pytest.raises(UserError, match=r"^islands-rendezvous=a:.* has no port .* --islands-rendezvous a:29400$"):
        parse_endpoint(f"a:{port}", "islands-rendezvous")


@pytest.mark.parametrize("host", ["a..b", "é..a", "a" * 64, ".a", "a\0b", "\ud800"])
def test_what_no_host_is_called_is_refused(host: str) -> None:
    with pytest.raises(UserError, match=r"^rendezvous=.* has a name that no host has; write it like"):
        parse_endpoint(f"{host}:1")


def test_a_machine_that_calls_itself_loopback_listens_where_others_reach_it() -> None:
    """As many distributions do: /etc/hosts gives the machine's own name an address that only itself has."""
    interface = Interface("eth0", "10.0.0.7")
    assert reachable("node0", ["127.0.1.1"], interface) == ["10.0.0.7"]
    assert reachable("node0", ["127.0.1.1", "10.0.0.9"], interface) == ["10.0.0.9"]
    assert reachable("localhost", ["127.0.0.1"], Interface("lo", "127.0.0.1")) == ["127.0.0.1"]
    assert reachable("127.0.0.1", ["127.0.0.1"], interface) == ["127.0.0.1"]


def test_the_machine_of_the_rendezvous_serves_it_once() -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    interface = find_interface("lo", endpoint)
    serving = listen_if_host(endpoint, interface)
    assert serving is not None and serving.getsockname() == ("127.0.0.1", endpoint.port)
    with serving:
        assert listen_if_host(endpoint, interface) is None, "another supervisor of this machine joins"
    assert listen_if_host(Endpoint("192.0.2.1", 29400), interface) is None, "that is another machine"
