"""Where each server of a configuration listens: configured ports are checked, missing ones are chosen free."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any, Final, TypeAlias

from nemo_gym.config_types import DEFAULT_HOST
from nemo_gym.configuration.loading import KeyPath, Node, describe
from nemo_gym.errors import ConfigError

Listener: TypeAlias = tuple[KeyPath, dict[str, Any]]
"""The path of a server's settings, and the settings: a mapping whose `host` and `port` are read and filled in."""

_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104
_PORT_ATTEMPTS: Final = 1000


def assign_addresses(root: Node, listeners: list[Listener], disallowed: Collection[int]) -> None:
    """Give each server a host and a port where its settings have none; ports are pairwise different.

    Args:
        root: The merged configuration, which knows where each value was written.
        listeners: The servers; their settings are changed.
        disallowed: Ports that no server may have.

    Raises:
        ConfigError: Two servers want one port, a port is disallowed, or a host can't be bound.
    """
    taken: dict[tuple[str, int], KeyPath] = {}
    for path, settings in listeners:
        settings["host"] = _host(root, settings.get("host"), (*path, "host"))
        if settings.get("port") is None:
            continue
        port_path = (*path, "port")
        if settings["port"] in disallowed:
            problem = f"port {settings['port']} is one of disallowed_ports"
            raise root.error(problem, port_path, "Leave it out to have one chosen.")
        _claim(root, (settings["host"], settings["port"]), port_path, taken)
    ports = {*disallowed, *(port for _, port in taken)}
    for path, settings in listeners:
        if settings.get("port") is None:
            settings["port"] = _free_port(root, settings["host"], ports, (*path, "host"))
            ports.add(settings["port"])


def find_open_port(host: str = DEFAULT_HOST, exclude: Collection[int] = frozenset()) -> int:
    """Return a TCP port that is free on `host` now and not in `exclude`.

    The port is not held: another process may take it before the caller binds it.

    Raises:
        ConfigError: The host is not an address of this machine, or no port is free.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        for _ in range(_PORT_ATTEMPTS):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                port: int = probe.getsockname()[1]
            if port not in exclude:
                return port
    except (OSError, UnicodeError) as error:
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"no port can be opened on host '{host}': {cause}") from error
    raise ConfigError(f"no port is free on host '{host}'")


def _free_port(root: Node, host: str, exclude: Collection[int], path: KeyPath) -> int:
    try:
        return find_open_port(host, exclude)
    except ConfigError as error:
        raise root.error(error.problem, path) from error


def _host(root: Node, host: Any, path: KeyPath) -> str:
    if host is None:
        return DEFAULT_HOST
    if not isinstance(host, str) or not host:
        raise root.error(f"expected a host name or address, got {describe(host)}", path)
    return host


def _claim(root: Node, address: tuple[str, int], path: KeyPath, taken: dict[tuple[str, int], KeyPath]) -> None:
    host, port = address
    for (other_host, other_port), other_path in taken.items():
        if port == other_port and _same_address(host, other_host):
            origin = root.nearest(other_path).origin
            raise root.error(
                f"port {port} on {host} is also that of {'.'.join(other_path)} ({origin})",
                path,
                "Give each server its own port, or leave it out to have one chosen.",
            )
    taken[address] = path


def _same_address(one: str, other: str) -> bool:
    hosts = {DEFAULT_HOST if host == "localhost" else host for host in (one, other)}
    return len(hosts) == 1 or not hosts.isdisjoint(_EVERY_ADDRESS)
