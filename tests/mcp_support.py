"""Servers that offer their tools over MCP, and two ways to call them: raw JSON-RPC, and the official client."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import httpx2
from fastapi import FastAPI
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from pydantic import PrivateAttr
from starlette.applications import Starlette

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.mcp_auto_exposure import TOKEN_HEADER, maybe_auto_expose
from nemo_gym.server.middleware import DisconnectMiddleware
from nemo_gym.server_utils import ServerClient
from tests.support import serving

LEGACY_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN_VERSION = "2026-07-28"
VERSIONS = (*LEGACY_VERSIONS, MODERN_VERSION)
ERAS = ("2025-11-25", MODERN_VERSION)
CLIENT_MODES = ("legacy", "auto")


class ToolServer(SimpleResourcesServer):
    """A resources server with the routes that a test gives it."""

    config: BaseResourcesServerConfig
    _add_routes: list[Callable[[FastAPI], Any]] = PrivateAttr(default_factory=list)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        for add in self._add_routes:
            add(app)
        return app

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        return BaseVerifyResponse(**body.model_dump(), reward=1.0)


def make_server(
    add_routes: Callable[[FastAPI], Any] | None = None,
    kind: type[ToolServer] = ToolServer,
    *,
    secret: str | list[str] = "a secret of these tests",
    **settings: Any,
) -> ToolServer:
    """Return a server named `toolbox` that exposes its tools over MCP."""
    settings = {
        "name": "toolbox", "host": "127.0.0.1", "port": 1, "entrypoint": "app.py", "expose_tools_over_mcp": True,
        **settings,
    }  # fmt: skip
    client = MagicMock(spec=ServerClient)
    client.global_config_dict = {"session_secret": secret}
    server = kind(config=BaseResourcesServerConfig.model_validate(settings), server_client=client)
    if add_routes is not None:
        server._add_routes.append(add_routes)
    return server


def make_app(server: ToolServer, **options: Any) -> FastAPI:
    """Return the server's application as the bootstrap of a single-worker server makes it."""
    app = server.setup_webserver()
    maybe_auto_expose(server, app, **options)
    app.add_middleware(DisconnectMiddleware, delay=0.01)
    return app


def new_http(**options: Any) -> httpx2.AsyncClient:
    """Return an HTTP client that is quick to make: without the system's certificates."""
    return httpx2.AsyncClient(timeout=60, verify=False, trust_env=False, **options)


@dataclass
class Rpc:
    """Raw JSON-RPC at `/mcp`, as a client of one protocol version would send it.

    Attributes:
        http: Sends it.
        url: The endpoint.
        version: The protocol version.
        token: The session token, if any.
        session_id: The `Mcp-Session-Id` to send, if any.
    """

    http: httpx2.AsyncClient
    url: str
    version: str = MODERN_VERSION
    token: str | None = None
    session_id: str | None = None
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    def headers(self, method: str = "", name: str = "") -> dict[str, str]:
        headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        if method != "initialize" or self.version == MODERN_VERSION:
            headers["mcp-protocol-version"] = self.version
        if self.version == MODERN_VERSION:
            headers |= {"mcp-method": method} | ({"mcp-name": name} if name else {})
        if self.token is not None:
            headers[TOKEN_HEADER] = self.token
        if self.session_id is not None:
            headers["mcp-session-id"] = self.session_id
        return headers

    def message(self, method: str, params: Mapping[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        params = dict(params or {})
        if self.version == MODERN_VERSION:
            params["_meta"] = {
                "io.modelcontextprotocol/protocolVersion": self.version,
                "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {},
            }
        return {"jsonrpc": "2.0", "method": method, "params": params, **fields}

    async def send(
        self, method: str, params: Mapping[str, Any] | None = None, headers: Any = (), **fields: Any
    ) -> httpx2.Response:
        """Post one message; `headers` are added, `fields` are further fields of the message."""
        sent = [*self.headers(method, (params or {}).get("name", "")).items(), *headers]
        return await self.http.post(self.url, content=json.dumps(self.message(method, params, **fields)), headers=sent)

    async def request(self, method: str, params: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """Post a request and return its result."""
        reply = await self.send(method, params, id=next(self._ids), **more)
        assert reply.status_code == 200, reply.text
        message = reply.json()
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def initialize(self) -> httpx2.Response:
        """Post `initialize` and take over the `Mcp-Session-Id` of its reply."""
        params = {"protocolVersion": self.version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        reply = await self.send("initialize", params, id=0)
        self.session_id = reply.headers.get("mcp-session-id", self.session_id)
        return reply

    async def call(self, name: str, arguments: Mapping[str, Any] | None = None, **more: Any) -> ToolResult:
        params = {"name": name} if arguments is None else {"name": name, "arguments": arguments}
        return ToolResult(await self.request("tools/call", params, **more))

    async def tools(self) -> dict[str, dict[str, Any]]:
        return {tool["name"]: tool for tool in (await self.request("tools/list"))["tools"]}


@dataclass
class ToolResult:
    """The result of a tool call, as it stood in the reply."""

    raw: dict[str, Any]

    @property
    def text(self) -> str:
        (content,) = self.raw["content"]
        assert content["type"] == "text"
        return str(content["text"])

    @property
    def status(self) -> int:
        return int(self.raw["_meta"]["nemo-gym/http-status"])

    @property
    def is_error(self) -> bool:
        return bool(self.raw.get("isError", False))

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Running:
    """A served application."""

    url: str
    http: httpx2.AsyncClient
    new_http: Callable[[], httpx2.AsyncClient] = new_http

    async def seed(self, body: Mapping[str, Any] | None = None, path: str = "") -> dict[str, Any]:
        """Start a session and return the `mcp` block of the reply; the client keeps no cookie."""
        async with self.new_http() as client:
            reply = await client.post(f"{self.url}{path}/seed_session", json=body or {})
        assert reply.status_code == 200, reply.text
        block: dict[str, Any] = reply.json()["mcp"]
        return block

    async def token(self, body: Mapping[str, Any] | None = None) -> str:
        return str((await self.seed(body))["headers"][TOKEN_HEADER])

    async def rpc(self, version: str = MODERN_VERSION, **fields: Any) -> Rpc:
        """Return raw access with the token of a new session."""
        if "token" not in fields:
            fields["token"] = await self.token()
        return Rpc(self.http, f"{self.url}/mcp", version, **fields)

    @asynccontextmanager
    async def client(self, mode: Any = "auto", block: Mapping[str, Any] | None = None) -> AsyncIterator[Client]:
        """Connect the official client with the `mcp` block of a seed reply."""
        block = block or await self.seed()
        async with new_http(headers=block["headers"]) as http:
            async with Client(streamable_http_client(self.url + block["url_path"], http_client=http), mode=mode) as it:
                yield it


@asynccontextmanager
async def running(app: Any, **config: Any) -> AsyncIterator[Running]:
    """Serve an application on a real socket."""
    async with serving(app, **config) as url, new_http() as http:
        yield Running(url, http)


@asynccontextmanager
async def in_process(app: Starlette) -> AsyncIterator[Running]:
    """Run an application's lifespan and call it without a socket, for tests that need none."""

    def new() -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), verify=False, trust_env=False)

    async with app.router.lifespan_context(app), new() as http:
        yield Running("http://localhost", http, new)


@asynccontextmanager
async def running_tools(add_routes: Callable[[FastAPI], Any], **settings: Any) -> AsyncIterator[Running]:
    """Serve a tool server with these routes."""
    async with running(make_app(make_server(add_routes, **settings))) as it:
        yield it
