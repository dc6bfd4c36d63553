"""Calls between servers: one pooled HTTP client per process, cookies carried by hand.

A call is repeated only while its connection could not be made: then nothing has reached the other side. A POST
that was sent is never sent again, whatever became of it, for it may have run; aiohttp repeats an idempotent request
(RFC 9110 section 9.2.2) once when its pooled connection turns out to be closed. The pool belongs to the event
loop it was first used on; close it there with `close_client()`.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import io
import logging
import random
import re
import resource
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.cookies import Morsel, SimpleCookie
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from weakref import WeakKeyDictionary

import orjson
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from yarl import URL

from nemo_gym.config_types import BaseServerConfig, server_url
from nemo_gym.errors import ServerNotFoundError, did_you_mean
from nemo_gym.global_config import (
    HEAD_SERVER_KEY_NAME,
    get_first_server_config_dict,
    get_global_config_dict,
    maybe_get_global_config_dict,
)
from nemo_gym.lazy_module import LazyModule
from nemo_gym.logs import ROLLOUT_HEADER, beginning_of, rollout_id
from nemo_gym.server.tracing import Tracing

if TYPE_CHECKING:
    import aiohttp

    from nemo_gym.server import owner_calls
    from nemo_gym.server.owner_calls import OwnerSockets
else:
    aiohttp = LazyModule("aiohttp")
    owner_calls = LazyModule("nemo_gym.server.owner_calls")

CONNECT_PATIENCE_S: Final = 60.0
"""For how long a call goes on trying to connect to a server that refuses, as one does while it restarts."""

# Less than the 5 s after which uvicorn closes an idle connection: this side then closes first, and no request is
# written to a connection that the other side is just closing.
_IDLE_KEEP_ALIVE_S: Final = 4.0
_CONNECT_TIMEOUT_S: Final = 30.0
_FIRST_BACKOFF_S: Final = 0.05
_LONGEST_BACKOFF_S: Final = 2.0
_MAX_HEADER_BYTES: Final = 64 * 1024
_SHOWN_BYTES: Final = 500
_NO_HEAD_HINT: Final = "Is the deployment running? `gym env status` shows its head server's address."
_LARGE_BODY_BYTES: Final = 512 * 1024
_MCP_PATH: Final = "/mcp"
# RFC 6265, section 4.1.1: what may stand in a cookie's value as it is.
_COOKIE_OCTETS: Final = re.compile(r"[!#-+\--:<-\[\]-~]*")

Cookies: TypeAlias = Mapping[str, str] | Mapping[str, Morsel[str]] | SimpleCookie

logger = logging.getLogger(__name__)

# The module function `request` has no object that could hold the pool.
_sessions: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]] = WeakKeyDictionary()


async def request(
    method: str,
    url: str,
    *,
    json: object = None,
    data: Any = None,
    cookies: Cookies | None = None,
    headers: Mapping[str, str] | None = None,
    connect_patience: float = CONNECT_PATIENCE_S,
    owners: OwnerSockets | None = None,
    **kwargs: Any,
) -> aiohttp.ClientResponse:
    """Send one HTTP request through the process's pool and return the reply, whatever its status.

    Args:
        method: The HTTP method.
        url: The absolute address.
        json: A pydantic model or JSON-able value for the body.
        data: A body of another kind, for example bytes.
        cookies: Cookies to send, for example an earlier reply's `cookies`; nothing is stored in between.
        headers: Headers to send.
        connect_patience: Seconds during which a refused connection is tried again.
        owners: The sockets of the server's workers, to go straight to the one that holds the session or is to hold
            it; None to go by the address.
        **kwargs: Passed on to `aiohttp.ClientSession.request`.

    Raises:
        aiohttp.ClientConnectorError: If no connection could be made in that time.
        aiohttp.ClientError: If the connection broke after the request was sent; it may have run.
    """
    sent_headers = dict(headers or {})
    if json is not None:
        data = _json_bytes(json)
        sent_headers.setdefault("Content-Type", "application/json")
    if cookies:
        name = next((key for key in sent_headers if key.lower() == "cookie"), "Cookie")
        sent_headers[name] = "; ".join(filter(None, [sent_headers.get(name), cookie_header(cookies)]))
    if owners is not None and (way := owners.way_of(method, url, sent_headers)) is not None:
        kwargs["middlewares"] = (*kwargs.get("middlewares", ()), way)

    session = _session()
    give_up = asyncio.get_running_loop().time() + connect_patience
    backoff = _FIRST_BACKOFF_S
    while True:
        try:
            return await session.request(method, url, headers=sent_headers, data=_in_parts(data), **kwargs)
        except aiohttp.ClientConnectorError as error:
            if not _may_pass(error) or asyncio.get_running_loop().time() + backoff > give_up:
                raise
            if backoff == _FIRST_BACKOFF_S:
                logger.info("%s %s: %s; trying again", method, public_url(url), error)
        await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311
        backoff = min(2 * backoff, _LONGEST_BACKOFF_S)


def public_url(url: str | URL) -> str:
    """Return `url` without what may be secret in it: user, password, query and fragment."""
    return str(URL(url).with_user(None).with_query(None).with_fragment(None))


async def close_client() -> None:
    """Close the running event loop's pool; a later request opens a new one."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


async def raise_for_status(response: aiohttp.ClientResponse) -> None:
    """Raise when `response` is an error (status 400 or above), keeping what it says.

    Raises:
        aiohttp.ClientResponseError: With the reply's body as `response_content` (bytes). Raised out of a handler
            it is answered with the same status and text.
    """
    if response.ok:
        return
    content = await response.read()
    text = beginning_of(content[: 4 * _SHOWN_BYTES].decode("utf-8", "replace"), _SHOWN_BYTES)
    error = aiohttp.ClientResponseError(
        response.request_info,
        response.history,
        status=response.status,
        message=text or response.reason or "",
        headers=response.headers,
    )
    error.response_content = content  # type: ignore[attr-defined]
    raise error


async def get_response_json(response: aiohttp.ClientResponse) -> Any:
    """Return the JSON value in the body of `response`.

    Raises:
        orjson.JSONDecodeError: If the body is no JSON.
    """
    return orjson.loads(await response.read())


def cookie_header(cookies: Cookies) -> str:
    """Return the value of a `Cookie` header (RFC 6265, section 4.2.1)."""
    return "; ".join(f"{name}={_cookie_value(name, value)}" for name, value in cookies.items())


class ServerClient(BaseModel):
    """Calls the servers of one configuration by their names.

    Args:
        head_server_config: Where the head server listens.
        global_config_dict: The resolved configuration, in which the servers' addresses stand.
        straight_to_owner: Whether a request of a session is written to the socket of the worker that holds it, or is
            to hold it, where that is on this machine and of this user; see `owner_calls`. False to go by the servers'
            addresses alone.
        tracing: Records the requests, and has them say to which trace they belong; None to record nothing.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    head_server_config: BaseServerConfig
    global_config_dict: DictConfig
    straight_to_owner: bool = True
    tracing: Tracing | None = Field(default=None, exclude=True, repr=False)

    _called: dict[str, OwnerSockets] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_config(
        cls, global_config_dict: DictConfig, *, straight_to_owner: bool = True, tracing: Tracing | None = None
    ) -> Self:
        """Return a client for the servers of a resolved configuration."""
        head = global_config_dict.get(HEAD_SERVER_KEY_NAME) or {}
        return cls(
            head_server_config=BaseServerConfig(host=head.get("host", "127.0.0.1"), port=head.get("port", 0)),
            global_config_dict=global_config_dict,
            straight_to_owner=straight_to_owner,
            tracing=tracing,
        )

    @classmethod
    def load_head_server_config(cls) -> BaseServerConfig:
        """Return where the head server of this process's configuration listens."""
        return cls.from_config(get_global_config_dict()).head_server_config

    @classmethod
    def load_from_global_config(cls, head_server_config: BaseServerConfig | None = None) -> Self:
        """Return a client for the running servers.

        In a server process the configuration is at hand. Elsewhere the head server is asked for it, which blocks
        for a moment.

        Args:
            head_server_config: Where the head server listens; from this process's configuration when None.
        """
        own = maybe_get_global_config_dict()
        if own is not None and head_server_config is None:
            return cls.from_config(own)
        if head_server_config is None:
            head_server_config = cls.load_head_server_config()
        return cls(
            head_server_config=head_server_config,
            global_config_dict=fetch_global_config_dict(head_server_config),
        )

    def url_of(self, server_name: str) -> str:
        """Return the base address of a server.

        Raises:
            ServerNotFoundError: If the configuration has no server of that name.
        """
        return self._sockets_of(server_name).url

    async def request(self, server_name: str, url_path: str, method: str, **kwargs: Any) -> aiohttp.ClientResponse:
        """Send a request to a server; see the module's `request` for the arguments, what it returns and raises."""
        sockets = self._sockets_of(server_name)
        rollout = rollout_id.get()
        if rollout is not None:
            kwargs["headers"] = {ROLLOUT_HEADER: rollout, **(kwargs.get("headers") or {})}
        # At the MCP endpoint a token names the worker, and a lost session may have to be told as JSON-RPC.
        is_straight = self.straight_to_owner and not url_path.startswith(_MCP_PATH)
        owners = sockets if is_straight else None
        if self.tracing is None:
            return await request(method, sockets.url + url_path, owners=owners, **kwargs)
        with self.tracing.call(server_name, method, url_path) as call:
            kwargs["headers"] = {**(kwargs.get("headers") or {}), **call.headers}
            response = await request(method, sockets.url + url_path, owners=owners, **kwargs)
            call.answered(response.status)
            return response

    def context_headers(self) -> dict[str, str]:
        """Return what a call that is made otherwise has to send so that logs and traces know whom it is for."""
        rollout = rollout_id.get()
        headers = {} if rollout is None else {ROLLOUT_HEADER: rollout}
        return headers if self.tracing is None else {**headers, **self.tracing.headers()}

    async def get(self, server_name: str, url_path: str, **kwargs: Any) -> aiohttp.ClientResponse:
        """GET `url_path` of a server; see the module's `request`."""
        return await self.request(server_name, url_path, "GET", **kwargs)

    async def post(self, server_name: str, url_path: str, **kwargs: Any) -> aiohttp.ClientResponse:
        """POST to `url_path` of a server; see the module's `request`."""
        return await self.request(server_name, url_path, "POST", **kwargs)

    def _sockets_of(self, server_name: str) -> OwnerSockets:
        known = self._called.get(server_name)
        if known is None:
            if server_name not in self.global_config_dict:
                names = [str(key) for key in self.global_config_dict]
                hint = did_you_mean(server_name, names)
                raise ServerNotFoundError(f"the configuration has no server '{server_name}'. {hint or ''}".rstrip())
            settings = get_first_server_config_dict(self.global_config_dict, server_name)
            url = self._build_server_base_url(settings)
            known = owner_calls.OwnerSockets(server_name, settings["host"], settings["port"], url)
            self._called[server_name] = known
        return known

    def _build_server_base_url(self, server_config_dict: Mapping[str, Any] | DictConfig) -> str:
        return server_url(server_config_dict["host"], server_config_dict["port"])


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connector = owner_calls.OwnerConnector(
            limit=max(100, descriptors * 3 // 4) if descriptors != resource.RLIM_INFINITY else 0,
            keepalive_timeout=_IDLE_KEEP_ALIVE_S,
            socket_factory=_keep_alive_socket,
        )
        session = _sessions[loop] = aiohttp.ClientSession(
            connector=connector,
            request_class=owner_calls.OwnerRequest,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )
    return session


def _keep_alive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A rollout may wait an hour for one reply: TCP keep-alive notices a peer that is gone without a word."""
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    return sock


def _may_pass(error: aiohttp.ClientConnectorError) -> bool:
    """Whether trying again makes sense: nothing was sent, and the cause is one that passes."""
    passing = {
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.EADDRNOTAVAIL,
    }
    return getattr(error.os_error, "errno", None) in passing


def _in_parts(data: Any) -> Any:
    """Have a large body written in parts: as one piece it would hold up the event loop."""
    return io.BytesIO(data) if isinstance(data, bytes) and len(data) > _LARGE_BODY_BYTES else data


def _json_bytes(value: object) -> bytes:
    if isinstance(value, BaseModel):
        return value.__pydantic_serializer__.to_json(value)
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _cookie_value(name: str, value: str | Morsel[str]) -> str:
    if isinstance(value, Morsel):
        return value.coded_value
    if _COOKIE_OCTETS.fullmatch(value):
        return value
    jar: SimpleCookie = SimpleCookie()
    jar[name] = value
    return jar[name].coded_value


def fetch_global_config_dict(head_server_config: BaseServerConfig) -> DictConfig:
    """Return the configuration that the head server serves. Blocks.

    Raises:
        ServerNotFoundError: If there is no head server at that address.
    """
    url = f"{server_url(head_server_config.host, head_server_config.port)}/global_config_dict_yaml"
    # Not by the pool: that needs an event loop, and the caller's may be running. Never through a proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_CONNECT_TIMEOUT_S) as response:
            config = OmegaConf.create(orjson.loads(response.read()))
    except urllib.error.HTTPError as error:
        reason = error.read(_SHOWN_BYTES).decode(errors="replace").strip()
        is_told = error.headers.get_content_type() == "text/plain" and reason
        raise ServerNotFoundError(
            f"no head server answers at {url}: {error}\n{reason if is_told else _NO_HEAD_HINT}"
        ) from error
    except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
        raise ServerNotFoundError(f"no head server answers at {url}: {error}\n{_NO_HEAD_HINT}") from error
    assert isinstance(config, DictConfig)
    return config


def get_server_url(server_name: str) -> str:
    """Return the base address of a server of this process's configuration.

    Raises:
        ServerNotFoundError: If it has no server of that name.
    """
    return ServerClient.from_config(get_global_config_dict()).url_of(server_name)
