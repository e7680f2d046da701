"""Islands: the place where they meet, which island this process is, and all of them on this machine for a proof."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuboid.errors import UserError, up_to
from cuboid.launch.network import Endpoint, find_interface, is_loopback, listen_if_host, parse_endpoint
from cuboid.readers import parse_json
from cuboid.secure_channel import VALUE, found_secret, given_secret, make_secret
from cuboid.spec.run import Run

if TYPE_CHECKING:
    from cuboid.islands.coordinator import Coordinator
    from cuboid.islands.sync import Site
    from cuboid.launch.pool import Pool

VARIABLE = "CUBOID_ISLAND"
"""What ranks are told of their island, however they are started."""
FAREWELL = 600.0
"""Seconds for which the process that decides for all waits for the others to end."""


@dataclass(frozen=True, kw_only=True)
class IslandOptions:
    """As the command line has them; None where they were not given."""

    island: int | None = None
    rendezvous: str | None = None
    interface: str | None = None

    def check(self, run: Run) -> None:
        """Refuses what cannot work before anything starts."""
        if run.islands.count == 1:
            if self.island is not None or self.rendezvous is not None:
                raise UserError("islands.count=1 has no islands; use --set islands.count=2 or more, or no --island")
            return
        if self.island is None or self.rendezvous is None:
            missing = "--island" if self.island is None else "--islands-rendezvous"
            raise UserError(
                f"islands.count={run.islands.count} needs {missing}; start each island with --island 0, 1, … and the "
                "same --islands-rendezvous HOST:PORT"
            )
        count, quorum = run.islands.count, run.islands.quorum
        if not 0 <= self.island < count:
            raise UserError(
                f"island={self.island} is none of islands.count={count}; use {up_to(count - 1, 'island=')}, or a "
                "larger count on all islands"
            )
        batch, weight = run.training.global_batch, run.islands.weight_of(self.island)
        if batch % weight:
            raise UserError(
                f"training.global_batch={batch} has no {weight} equal parts, island {self.island}'s weight in islands."
                f"batch_weights={run.islands.batch_weights}; use training.global_batch={-(-batch // weight) * weight}"
            )
        if len(self.endpoints()) > 1 and 2 * quorum <= count:
            raise UserError(
                f"islands.quorum={quorum} of count={count} lets two halves of a broken network decide apart at several "
                f"places of islands-rendezvous; use islands.quorum={count // 2 + 1}, or one place"
            )

    def endpoints(self) -> list[Endpoint]:
        """Where the islands meet, the first choice first."""
        return [parse_endpoint(each.strip(), "islands-rendezvous") for each in (self.rendezvous or "").split(",")]


def with_own_folders(run: Run, options: IslandOptions) -> Run:
    """The run of one island: what it writes lies beside what others write, should they share a disk."""
    if options.island is None:
        return run
    own = f"island-{options.island}"
    checkpoint = run.checkpoint
    if checkpoint.folder:
        checkpoint = replace(checkpoint, folder=f"{checkpoint.folder.rstrip('/')}/{own}")
    output = replace(run.output, folder=str(Path(run.output.folder) / own))
    return replace(run, output=output, checkpoint=checkpoint)


@contextmanager
def met(run: Run, options: IslandOptions) -> Iterator[Callable[[], None]]:
    """Listens where islands meet, if that is this machine; ranks that start here find their island. What is yielded is
    called when nothing is refused any more: it makes the secret of the islands if there is none, and from then on this
    process decides for all of them where it listens, until all have left."""
    if options.island is None:
        yield lambda: None
        return
    endpoints, folder = options.endpoints(), Path(run.output.folder).parent  # of all islands
    secret = found_secret(os.environ, folder)
    if secret is None and not all(is_loopback(each.host) for each in endpoints):
        raise UserError(f"islands need a secret that all of them know; set {VALUE}, see docs/security.md")
    interfaces = [find_interface(options.interface, each) for each in endpoints]
    places = [(each.host, each.port) for each in endpoints]
    told = {"number": options.island, "places": places, "address": interfaces[0].address}
    with ExitStack() as stack:
        for name in (VALUE, VARIABLE):
            stack.callback(_restore, name, os.environ.get(name))
        os.environ[VARIABLE] = json.dumps(told)
        if secret is not None:
            os.environ[VALUE] = secret.decode()
        found = [listen_if_host(*each) for each in zip(endpoints, interfaces, strict=True)]
        listeners = [stack.enter_context(listener) for listener in found if listener is not None]

        def begin() -> None:
            known = secret or make_secret(folder)
            os.environ[VALUE] = known.decode()
            for listener in listeners:
                coordinator = stack.enter_context(coordinated(run, listener, known))
                stack.callback(coordinator.wait_until_left, FAREWELL)

        yield begin


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def site_of(run: Run, environment: Mapping[str, str]) -> Site | None:
    """Which island ranks of this process belong to."""
    if run.islands.count == 1:
        return None
    from cuboid.islands.sync import Site

    text, secret = environment.get(VARIABLE), given_secret(environment)
    if text is None or secret is None:
        raise UserError(f"islands.count={run.islands.count} needs --island; start each island with cuboid train")
    told = parse_json(text)
    places = tuple((str(host), int(port)) for host, port in told["places"])
    return Site(int(told["number"]), places, str(told["address"]), secret)


@contextmanager
def coordinated(run: Run, listener: socket.socket, secret: bytes, first: int = 0) -> Iterator[Coordinator]:
    """Meanwhile this process decides for all islands. `first`: how many begin together."""
    from cuboid.islands.coordinator import Coordinator  # here: a node that only supervises need not wait for torch
    from cuboid.islands.membership import Membership

    coordinator = Coordinator(listener, secret, Membership(run.islands, run.training.steps, first))
    try:
        yield coordinator
    finally:
        coordinator.close()


def prove(runs: Sequence[Run], pool: Pool) -> dict[str, Any]:
    """All islands on this machine, over loopback, against a simulation in one process."""
    secret, listener = secrets.token_bytes(32), socket.create_server(("127.0.0.1", 0))
    with coordinated(runs[0], listener, secret, len(runs)):
        return prove_at(runs, pool, (("127.0.0.1", listener.getsockname()[1]),), secret)


def prove_at(runs: Sequence[Run], pool: Pool, places: tuple[tuple[str, int], ...], secret: bytes) -> dict[str, Any]:
    """… where somebody decides for them at one of these places."""
    jobs = [((run, number, places, secret), run.layout.world_size) for number, run in enumerate(runs)]
    training, train = runs[0].training, "cuboid.verification.islands:train_island"
    told = pool.run_apart(train, jobs, device=training.device, backend=training.backend)
    observed = [ranks[0] for ranks in told]
    verdict: dict[str, Any] = pool.run("cuboid.verification.islands:judge", (list(runs), observed), ranks=1)[0]
    return verdict
