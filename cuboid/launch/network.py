"""Which address and interface a job on many nodes uses, and whether the rendezvous is served by this machine."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass

import psutil

from cuboid.errors import UserError
from cuboid.spec.suggest import either, nearest_names

NAME_PATIENCE = 30.0
"""Seconds in which the name of the rendezvous may become known."""


@dataclass(frozen=True)
class Endpoint:
    """HOST:PORT, where the supervisors of a job meet."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Interface:
    """Where this machine's part of a job listens."""

    name: str
    address: str


def parse_endpoint(text: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise UserError(f"rendezvous={text} does not say HOST:PORT; write it like --rendezvous node0:29400")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"rendezvous={text} has no port from 1 to 65535; write it like --rendezvous {host}:29400")
    return Endpoint(host.strip("[]"), int(port))


def find_interface(asked: str | None, endpoint: Endpoint) -> Interface:
    """The interface asked for by name or address; left out: the one from which the rendezvous is reached."""
    found = {
        name: [
            entry.address.partition("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, entries in psutil.net_if_addrs().items()
    }
    found = {name: addresses for name, addresses in found.items() if addresses}
    wanted = asked if asked is not None else _own_address(endpoint)
    for name, addresses in found.items():
        if wanted == name or wanted in addresses:
            return Interface(name, addresses[0] if wanted == name else wanted)
    near = either(nearest_names(wanted, found))
    raise UserError(f"interface={wanted} is no interface or address of this machine; use --interface {near}")


def _own_address(endpoint: Endpoint) -> str:
    """The address this machine would send from; nothing is sent. Where nodes start together the name of another one may
    not be known yet."""
    until = time.monotonic() + NAME_PATIENCE
    while not (found := _resolve(endpoint)) and time.monotonic() < until:
        time.sleep(1)
    for family, kind, _, _, where in found:
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise UserError(f"rendezvous={endpoint} cannot be reached from here; check the host's name, or say --interface")


def _resolve(endpoint: Endpoint) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)  # type: ignore[return-value]
    except OSError:
        return []


def listen_if_host(endpoint: Endpoint, interface: Interface) -> socket.socket | None:
    """A listening socket at the rendezvous if that is this machine and nobody serves it yet, else nothing.

    A host known by a name that does not lead here, as behind some name servers, is known by the machine's own name."""
    addresses = [str(where[0]) for _, _, _, _, where in _resolve(endpoint)]
    if endpoint.host.partition(".")[0] == socket.gethostname().partition(".")[0] and interface.address not in addresses:
        addresses.append(interface.address)
    for address in addresses:
        try:
            return listen(address, endpoint.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None  # a supervisor of this job, started earlier on this machine
            if error.errno == errno.EACCES:
                raise UserError(
                    f"rendezvous={endpoint} has a port that is not allowed here; use 1024 or more"
                ) from None
    return None


def listen(address: str, port: int) -> socket.socket:
    """On this address and no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)
