"""Chooses the address to listen on: only the one that the job uses.

A job on one host listens on the loopback device. A job on several hosts listens on the interface of its meeting point.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import struct
from typing import Any

log = logging.getLogger("phalanx")

NAMES_OF_LOOPBACK = frozenset({"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"})


def is_loopback(host: str) -> bool:
    """Whether `host` can only mean the local host. Its own name does not count: elsewhere it may resolve differently."""
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return host.lower() in NAMES_OF_LOOPBACK


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Listen at the address of this host that `host` names. Raise OSError if the port is taken."""
    if (listener := listen_here(host, port, backlog)) is not None:
        return listener
    # happens with a Kubernetes service, a port that a container engine forwards, a name that /etc/hosts maps to 127.0.1.1
    log.warning(
        "phalanx: %s is not an address of this host, so rank 0 listens on all its addresses at port %d: "
        "set MASTER_ADDR to its address in the job's network",
        host,
        port,
    )
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=backlog)


def listen_here(host: str, port: int, backlog: int) -> socket.socket | None:
    """Listen like `listen`, but return None if `host` is another host."""
    for family, address in _resolved(host, port):
        if (listener := _listen_at(family, address, backlog)) is not None:
            return listener
    return None


def _listen_at(family: socket.AddressFamily, address: Any, backlog: int) -> socket.socket | None:
    """Listen at `address`. Return None if it belongs to another host."""
    try:
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return None
        raise


def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the addresses that other hosts may resolve `host` to, IPv4 first. A client tries all of them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    loopback = is_loopback(host)
    places: list[tuple[socket.AddressFamily, Any]] = [
        (family, address) for family, _, _, _, address in found if loopback or not is_loopback(str(address[0]))
    ]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET)


def interface_towards(address: str, port: int) -> str | None:
    """Return the name of the interface that this host uses to reach `address`, or None if unknown."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port))  # sends nothing: a datagram socket only chooses its route
            mine = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    if fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24] == mine:  # SIOCGIFADDR
                        return name
                except OSError:
                    continue  # an interface without an IPv4 address
    except (OSError, ImportError):
        pass
    return None


def own_address(interface: str, towards: str | None) -> str:
    """Return the address of `interface` or, if it is empty, the one that this host uses to reach `towards`."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            if interface:
                return _address_of(interface, probe)
            if towards:
                probe.connect((towards, 9))
                return str(probe.getsockname()[0])
    except (OSError, ImportError):
        pass
    return socket.gethostbyname(socket.gethostname())  # as gloo does


def _address_of(interface: str, probe: socket.socket) -> str:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
