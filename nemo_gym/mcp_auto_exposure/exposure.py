"""Exposing an application: its tools are read, and two middlewares put around it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.errors import ConfigError, MissingExtraError
from nemo_gym.mcp_auto_exposure.harvest import CatchAll, Harvest, MCPTool, all_routes, checked_tools, harvest_tools
from nemo_gym.mcp_auto_exposure.hosts import AllowedHosts
from nemo_gym.mcp_auto_exposure.keep_alive import KEEP_ALIVE_S
from nemo_gym.mcp_auto_exposure.session_replies import MCP_PATH, SessionRepliesMiddleware
from nemo_gym.mcp_auto_exposure.tokens import TOKEN_HEADER, session_token_serializer
from nemo_gym.session_routing import read_token_header, route_path

if TYPE_CHECKING:
    from nemo_gym.mcp_auto_exposure.endpoint import MCPEndpoint

_SDK_LOGGER: Final = "mcp.server"
_MCP_PATHS: Final = frozenset({MCP_PATH, f"{MCP_PATH}/"})
# What a client may well post with the token among its usual headers, and what needs no session.
_WITHOUT_SESSION: Final = frozenset({"/seed_session", "/aggregate_metrics"})
_TOKEN_ALONE: Final = (
    f"The token in {TOKEN_HEADER} opens {MCP_PATH} only. Here a session is named by the cookie '{{}}', which the reply "
    "to /seed_session sets."
)

logger = logging.getLogger(__name__)


class ExposureSettings(Protocol):
    """The settings that exposure reads; `BaseResourcesServerConfig` has them."""

    name: str
    host: str
    expose_tools_over_mcp: bool
    mcp_allowed_hosts: list[str]
    mcp_allowed_origins: list[str]
    mcp_lost_session: Any


class ExposedServer(Protocol):
    """What exposure needs of a resources server; `SimpleResourcesServer` has it."""

    @property
    def config(self) -> ExposureSettings:
        """The server's settings."""
        ...

    def session_keys(self) -> Sequence[str]:
        """Return the keys of the server's sessions: the first signs, all of them verify."""
        ...

    def get_session_middleware_key(self) -> str:
        """Return the session cookie's name."""
        ...

    def sign_session(self, session: Mapping[str, Any]) -> str:
        """Return the session cookie's value for a session."""
        ...

    def mcp_tools(self, harvested: list[MCPTool], catchall: CatchAll | None) -> Iterable[MCPTool]:
        """Return the tools to serve, of those harvested and others."""
        ...

    def mcp_allowed_tools_for_session(
        self, seed_body: dict[str, Any]
    ) -> Iterable[str] | Awaitable[Iterable[str] | None] | None:
        """Return the names of the tools that a new session may use; None for all."""
        ...


class MCPMiddleware:
    """Answers `/mcp` instead of the application within. Stands outside all but the session router.

    Args:
        app: The application within, from its session middleware inwards.
        endpoint: What answers.
        application: The whole application, which knows how to answer what passes all its middleware.
        cookie: The session cookie's name.
    """

    def __init__(self, app: ASGIApp, *, endpoint: MCPEndpoint, application: FastAPI, cookie: str) -> None:
        self.app = app
        self._endpoint = endpoint
        self._cookie = cookie
        handlers = application.exception_handlers
        # It stands outermost in every application, so it has to be around the tool calls too.
        self._called = ServerErrorMiddleware(
            app, handler=handlers.get(500) or handlers.get(Exception), debug=application.debug
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = route_path(scope)
        if path in _MCP_PATHS:
            await self._endpoint.handle(self._called, scope, receive, send)
        elif scope["method"] == "POST" and path not in _WITHOUT_SESSION and self._has_token_alone(scope):
            await JSONResponse({"detail": _TOKEN_ALONE.format(self._cookie)}, 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _has_token_alone(self, scope: Scope) -> bool:
        """Whether a request names its session by the token only: the routes would see a new, empty session."""
        header = read_token_header(scope["headers"], TOKEN_HEADER)
        if header.value is None and not header.doubled:
            return False
        cookie = self._cookie.encode("latin-1") + b"="
        return not any(name == b"cookie" and cookie in value for name, value in scope["headers"])


def maybe_auto_expose(server: ExposedServer, app: FastAPI, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
    """Serve the tools of `app` at `/mcp` as well, if the server's settings say `expose_tools_over_mcp`.

    Call it when the application has all its routes and middleware, and before session routing is installed; a server
    that is started by `run_webserver` does so itself. A second call changes nothing.

    Args:
        server: The resources server.
        app: What its `setup_webserver` returned.
        keep_alive_s: Seconds without a sign of life, at most, while a client waits for a slow tool.

    Raises:
        MissingExtraError: If the extra `mcp` is not installed.
        ConfigError: If the application has a route `/mcp` of its own, or `mcp_tools` gave something unusable.
    """
    if not server.config.expose_tools_over_mcp or getattr(app.state, "exposed_over_mcp", False):
        return
    try:
        from nemo_gym.mcp_auto_exposure.endpoint import MCPEndpoint  # noqa: PLC0415
    except ImportError as error:
        # Missing, or of another major version.
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise MissingExtraError("mcp", f"'expose_tools_over_mcp: true' of {server.config.name}") from error
    name = server.config.name
    if any(str(getattr(route, "path", "")).rstrip("/") == MCP_PATH for route in all_routes(app)):
        raise ConfigError(
            "the server has a route /mcp of its own", key=f"{name}.expose_tools_over_mcp", hint="Leave the setting out."
        )
    harvest = harvest_tools(app)
    tools = checked_tools(server.mcp_tools(list(harvest.tools), harvest.catchall), name)
    _tell(name, harvest, tools)
    serializer = session_token_serializer(server)
    hosts = AllowedHosts(server.config.host, server.config.mcp_allowed_hosts, server.config.mcp_allowed_origins)
    as_jsonrpc = server.config.mcp_lost_session == "jsonrpc"
    endpoint = MCPEndpoint(
        server, name, tools, serializer, hosts, errors_as_jsonrpc=as_jsonrpc, keep_alive_s=keep_alive_s
    )
    app.user_middleware.append(
        Middleware(
            SessionRepliesMiddleware,
            server=server,
            server_name=name,
            tools=[tool.name for tool in tools],
            serializer=serializer,
        )
    )
    app.add_middleware(MCPMiddleware, endpoint=endpoint, application=app, cookie=server.get_session_middleware_key())
    app.router.lifespan_context = _with_endpoint(app.router.lifespan_context, endpoint)
    app.state.exposed_over_mcp = True
    _silence_sdk()


def _tell(name: str, harvest: Harvest, tools: list[MCPTool]) -> None:
    logger.info("%s: %d tools at %s: %s", name, len(tools), MCP_PATH, ", ".join(tool.name for tool in tools) or "none")
    served = {tool.path for tool in tools}
    for path, reason in harvest.refused.items():
        if path not in served:
            logger.warning("%s: POST %s is not served over MCP: %s", name, path, reason)
    routes = {tool.path for tool in harvest.tools}
    if harvest.catchall is not None and not served - routes:
        logger.warning(
            "%s: POST %s is not served over MCP: its tools come from data; return them from mcp_tools",
            name,
            harvest.catchall.path,
        )


def _silence_sdk() -> None:
    """Keep the SDK from telling of every request, unless the process has set its own level for it."""
    sdk = logging.getLogger(_SDK_LOGGER)
    if sdk.level == logging.NOTSET and logging.getLogger(_SDK_LOGGER.partition(".")[0]).level == logging.NOTSET:
        sdk.setLevel(logging.WARNING)


def _with_endpoint(
    inner: Callable[[Any], AbstractAsyncContextManager[Any]], endpoint: MCPEndpoint
) -> Callable[[Any], Any]:
    """Return the lifespan `inner` with the endpoint serving around it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        async with endpoint.running(), inner(app) as state:
            yield state

    return lifespan
