"""Which address and interface a job on many nodes uses, and whether the rendezvous is served by this machine."""

from __future__ import annotations

import errno
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from cuboid.errors import UserError, either, nearest_names

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


def parse_endpoint(text: str, option: str = "rendezvous") -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise UserError(f"{option}={text} does not say HOST:PORT; write it like --{option} node0:29400")
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UserError(f"{option}={text} has no port from 1 to 65535; write it like --{option} {host}:29400")
    host = host.strip("[]")
    if not is_host(host):
        raise UserError(f"{option}={text} has a name that no host has; write it like --{option} node0:{port}")
    return Endpoint(host, int(port))


def is_host(name: str) -> bool:
    """Whether the system can be asked for an address under this name: it has no empty part, and none of more than 63
    letters."""
    try:
        return bool(name.encode("idna")) and "\0" not in name
    except UnicodeError:
        return False


def find_interface(asked: str | None, endpoint: Endpoint) -> Interface:
    """The interface asked for by name or address; default: the one from which the rendezvous is reached."""
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
    """The address this machine would send from. Where nodes start together the name of another one may not be known
    yet."""
    until = time.monotonic() + NAME_PATIENCE
    while not (found := _resolve(endpoint)) and time.monotonic() < until:
        time.sleep(1)
    own = next(filter(None, map(_sends_from, found)), None)
    if own is None:
        raise UserError(f"rendezvous={endpoint} cannot be reached from here; check the host's name, or say --interface")
    if is_loopback(own) and not is_loopback(endpoint.host):  # it calls itself so, and others must call it otherwise
        own = _sends_from("192.0.2.1") or own
    return own


def _sends_from(address: str) -> str | None:
    """Nothing is sent."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _resolve(endpoint: Endpoint) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(endpoint.host, None, type=socket.SOCK_DGRAM)]
    except OSError:
        return []


def reachable(host: str, addresses: list[str], interface: Interface) -> list[str]:
    """Of the addresses that a host's name has here, those that other machines reach: many a machine knows itself by a
    loopback address, and some not at all."""
    if is_loopback(host):
        return addresses
    outward = [address for address in addresses if not is_loopback(address)]
    return outward if outward or not addresses else [interface.address]


def listen_if_host(endpoint: Endpoint, interface: Interface) -> socket.socket | None:
    """A listening socket at the rendezvous if that is this machine and nobody serves it yet, else nothing."""
    addresses = reachable(endpoint.host, _resolve(endpoint), interface)
    named = endpoint.host.partition(".")[0] == socket.gethostname().partition(".")[0]
    for address in addresses or ([interface.address] if named else []):
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
    return socket.create_server((address, port), family=_family(address), backlog=1024)
