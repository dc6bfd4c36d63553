"""Names in `Host` headers: which of them may address a server, as a defence against DNS rebinding.

A web page can make a browser ask any address, and by rebinding its own name to that address even read the answers.
The page's name then stands in `Host`. So names must be known ones; an IP address can't have been rebound.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_LOOPBACK_NAME: Final = "localhost"
_ANY: Final = "*"
_HOST: Final = re.compile(r"(\[(?P<ipv6>[0-9a-f:.%]+)\]|(?P<name>[^\s:@/\[\]]+))(:\d*)?")


class HostGuard:
    """Answers 403 to requests that come under a name the application is not known by.

    Args:
        app: The application.
        bound_host: The host that it listens on. One that listens on loopback is known by loopback names only; any
            other by IP addresses and this machine's name.
        hosts: Further names, "*" for any.
        hint: What to do about a refusal.
    """

    def __init__(self, app: ASGIApp, bound_host: str, hosts: Iterable[str], hint: str) -> None:
        self._app = app
        self._names = {_LOOPBACK_NAME, bound_host.lower(), *map(name_in, hosts)}
        self._loopback_only = is_loopback(bound_host)
        if not self._loopback_only:
            self._names.add(socket.gethostname().lower())
        self._hint = hint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or let the application answer."""
        if scope["type"] == "http" and not self._allows(_host_of(scope)):
            refusal = PlainTextResponse(f"This name may not be used to reach this server. {self._hint}\n", 403)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        name = name_in(host)
        if not name:
            return False
        if _ANY in self._names or name in self._names:
            return True
        return is_ip_address(name) and (not self._loopback_only or is_loopback(name))


def _host_of(scope: Scope) -> str:
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return hosts[0].decode("latin-1") if len(hosts) == 1 else ""


def name_in(host: str) -> str:
    """Return the name in a `Host` header in lower case, an IPv6 address without its brackets; empty if it has none."""
    match = _HOST.fullmatch(host.lower())
    return (match["ipv6"] or match["name"] or "") if match else ""


def is_ip_address(name: str) -> bool:
    """Return whether `name` is a literal IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return whether `name` is localhost or a literal address that only this machine can reach."""
    return name.lower() == _LOOPBACK_NAME or (is_ip_address(name) and ipaddress.ip_address(name).is_loopback)
