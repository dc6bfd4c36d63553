"""Who may address `/mcp`: a defence against DNS rebinding that lets sandboxes in.

A web page can make a browser post to any address, and by rebinding its own name to that address even read the
answers (https://modelcontextprotocol.io, "Streamable HTTP: security warning"). The page's name then stands in
`Host`, and its own address in `Origin`. So names must be known ones; an IP address can't have been rebound.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from nemo_gym.server.host_header import is_ip_address, name_in

_ANY: Final = "*"
_LOOPBACK_NAME: Final = "localhost"


class AllowedHosts:
    """Decides by the `Host` and `Origin` headers of a request.

    Args:
        server_host: The host that the server's configuration names.
        hosts: Further names, with or without a port; "*" for any.
        origins: Further origins (`https://name:port`); "*" for any.
    """

    def __init__(self, server_host: str, hosts: Iterable[str], origins: Iterable[str]) -> None:
        own = {_LOOPBACK_NAME, server_host, socket.gethostname()}
        self._hosts = {name.lower() for name in (*own, *hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def allows_host(self, host: str | None) -> bool:
        """Return whether a request may address this server as `host` (a `Host` header, RFC 9110 section 7.2)."""
        return host is not None and host != "" and (_ANY in self._hosts or self._knows(host))

    def allows_origin(self, origin: str | None, host: str | None) -> bool:
        """Return whether a page of `origin` may call; requests of anything but a browser have none.

        Args:
            origin: The `Origin` header (RFC 6454 section 7), if any.
            host: The `Host` header.
        """
        if origin is None or _ANY in self._origins or origin.lower() in self._origins:
            return True
        try:
            page = urlsplit(origin)
            name = page.hostname or ""
        except ValueError:
            return False
        if page.scheme not in ("http", "https"):
            return False
        # Where any host is allowed, that of a page may be a rebound one.
        is_same = host is not None and page.netloc.lower() == host.lower() and self._knows(host)
        return is_same or name == _LOOPBACK_NAME or (is_ip_address(name) and ipaddress.ip_address(name).is_loopback)

    def _knows(self, host: str) -> bool:
        name = name_in(host)
        return name != "" and (is_ip_address(name) or name in self._hosts or host.lower() in self._hosts)


def checked_host(host: str) -> str:
    """Return an entry of `mcp_allowed_hosts` that can match a `Host` header.

    Raises:
        ValueError: If it can't.
    """
    if host != _ANY and not name_in(host):
        raise ValueError(f"{host!r} is no host; expected a name such as 'host.docker.internal' or 'name:8000', or '*'")
    return host


def checked_origin(origin: str) -> str:
    """Return an entry of `mcp_allowed_origins` that can match an `Origin` header.

    Raises:
        ValueError: If it can't.
    """
    scheme, _, host = origin.rstrip("/").partition("://")
    if origin != _ANY and not (scheme and name_in(host)):
        raise ValueError(f"{origin!r} is no origin; expected one such as 'https://inspector.example', or '*'")
    return origin
