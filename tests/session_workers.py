"""Workers for the tests of session routing: real uvicorn servers, several in one event loop, on free ports."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import itsdangerous
import uvicorn
from starlette.applications import Starlette
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from nemo_gym.session_routing import (
    SESSION_OWNER_KEY,
    SessionRoutingMiddleware,
    install_session_routing,
    worker_socket_path,
)
from nemo_gym.session_routing.forwarding import HopName

SECRET = "a secret of these tests"
COOKIE = "sid"
TOKEN_HEADER = "X-Session-Token"
FORTNIGHT = 14 * 24 * 60 * 60


class UnderTest:
    """What the workers are started with where a test says nothing else; the fixture `hop` sets it."""

    hop: HopName = "frames"


@dataclass
class Reply:
    """A reply as it stood on the wire; `complete` is false when the connection broke off before its end."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    complete: bool = True

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def cookie(self) -> str:
        """The session cookie that the reply sets, as `name=value`."""
        (cookie,) = self.all("set-cookie")
        return cookie.partition(";")[0]


@dataclass
class Worker:
    """One running worker."""

    app: Starlette
    worker_id: str
    port: int
    server: uvicorn.Server
    _stopped: bool = field(default=False)

    @property
    def router(self) -> SessionRoutingMiddleware:
        router: SessionRoutingMiddleware = self.app.state.session_routing
        return router

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            await self.server.shutdown()

    async def connect(self) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**24)
        return Connection(reader, writer)

    async def request(
        self,
        target: str,
        *,
        method: str = "GET",
        cookie: str | None = None,
        headers: list[tuple[str, str]] | None = None,
        body: bytes | None = None,
    ) -> Reply:
        sent = [("host", "workers.test"), ("connection", "close"), *(headers or [])]
        if cookie is not None:
            sent.append(("cookie", cookie))
        if body is not None:
            sent.append(("content-length", str(len(body))))
        async with await self.connect() as connection:
            connection.send_head(method, target, sent)
            connection.writer.write(body or b"")
            return await connection.reply(method)


@dataclass
class Connection:
    """A client's connection, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def reading(self) -> asyncio.ReadTransport:
        transport = self.writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        return transport

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send_head(self, method: str, target: str, headers: list[tuple[str, str]]) -> None:
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
        self.writer.write("\r\n".join(lines).encode("latin-1"))

    async def head(self) -> Reply:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = raw.rstrip("\r\n").split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return Reply(int(status.split()[1]), headers, b"")

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def reply(self, method: str = "GET") -> Reply:
        reply = await self.head()
        try:
            if method == "HEAD" or reply.status in {204, 304}:
                pass
            elif reply.all("transfer-encoding"):
                while chunk := await self.chunk():
                    reply.body += chunk
            else:
                reply.body = await self.reader.readexactly(int(reply.all("content-length")[0]))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            reply.complete = False
        return reply


async def seed(request: Request) -> Response:
    request.session["id"] = session_id = uuid.uuid4().hex
    request.app.state.counts[session_id] = 0
    return JSONResponse({"worker": request.app.state.worker_id})


async def count(request: Request) -> Response:
    counts = request.app.state.counts
    session_id = request.session.get("id", "nobody")
    counts[session_id] = counts.get(session_id, 0) + 1
    return JSONResponse({"count": counts[session_id], "worker": request.app.state.worker_id})


async def seen(request: Request) -> Response:
    """Answer with all that a handler can see of the request."""
    body = await request.body()
    scope = request.scope
    return JSONResponse(
        {
            "method": scope["method"],
            "path": scope["path"],
            "raw_path": scope["raw_path"].decode("latin-1"),
            "query": scope["query_string"].decode("latin-1"),
            "headers": [[n.decode("latin-1"), v.decode("latin-1")] for n, v in scope["headers"]],
            "client": list(scope["client"] or ()),
            "server": list(scope["server"] or ()),
            "scheme": scope["scheme"],
            "http_version": scope["http_version"],
            "root_path": scope["root_path"],
            "body": base64.b64encode(body).decode(),
            "worker": request.app.state.worker_id,
        }
    )


async def health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def make_app(*routes: Route, **kwargs: Any) -> Starlette:
    """Return an application with a counter per session, `/seen`, and `routes`."""
    app = Starlette(
        routes=[
            Route("/seed", seed, methods=["POST"]),
            Route("/count", count, methods=["POST"]),
            Route("/health", health),
            *routes,
            Route("/{path:path}", seen, methods=METHODS),
        ],
        **kwargs,
    )
    app.state.counts = {}
    app.add_middleware(SessionMiddleware, secret_key=SECRET, session_cookie=COOKIE)
    return app


@asynccontextmanager
async def running_worker(
    app: Starlette,
    socket_dir: Path,
    *,
    outside: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    root_path: str = "",
    **install: Any,
) -> AsyncIterator[Worker]:
    """Serve `app`, within what `outside` puts around it, as one worker with its sessions routed."""
    options = {"session_cookie": COOKIE, "secret_key": SECRET, "hop": UnderTest.hop, **install}
    worker_id = install_session_routing(app, socket_dir=socket_dir, **options)
    app.state.worker_id = worker_id
    async with serving(outside(app), root_path=root_path) as (server, port):
        worker = Worker(app, worker_id, port, server)
        try:
            yield worker
        finally:
            await worker.stop()


@asynccontextmanager
async def serving(app: ASGIApp, *, root_path: str = "") -> AsyncIterator[tuple[uvicorn.Server, int]]:
    """Start a uvicorn server on the running loop; the caller shuts it down."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, root_path=root_path, timeout_graceful_shutdown=2
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    yield server, server.servers[0].sockets[0].getsockname()[1]


@asynccontextmanager
async def running_workers(
    socket_dir: Path, number: int = 2, app: Callable[[], Starlette] = make_app, *, limit: float = 20, **install: Any
) -> AsyncIterator[list[Worker]]:
    """Serve `number` workers that share a socket directory; they stop all at once, which is quicker.

    Everything done with them must end within `limit` seconds.
    """
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running_worker(app(), socket_dir, **install)) for _ in range(number)]
        try:
            async with asyncio.timeout(limit):
                yield workers
        finally:
            await asyncio.gather(*(worker.stop() for worker in workers))


def signed_cookie(payload: Any, *, secret: str = SECRET, name: str = COOKIE, age: int = 0) -> str:
    """Return a session cookie as Starlette signs it, `age` seconds ago."""

    class Dated(itsdangerous.TimestampSigner):
        def get_timestamp(self) -> int:
            return super().get_timestamp() - age

    data = payload if isinstance(payload, bytes) else base64.b64encode(json.dumps(payload).encode())
    return f"{name}={Dated(secret).sign(data).decode()}"


def owned_cookie(worker_id: str, **kwargs: Any) -> str:
    return signed_cookie({"id": "a", SESSION_OWNER_KEY: worker_id}, **kwargs)


class TokenSerializer(itsdangerous.URLSafeTimedSerializer):
    """Reads tokens as an application's own serializer does: with the limit of their age in it."""

    def loads(self, s: str | bytes, *args: Any, **kwargs: Any) -> Any:
        return super().loads(s, max_age=FORTNIGHT)


def signed_token(payload: Any, *, secret: str = "token secret", age: int = 0) -> str:
    """Return an MCP session token, signed `age` seconds ago; bytes are signed as they are."""

    class Dated(itsdangerous.TimestampSigner):
        def get_timestamp(self) -> int:
            return super().get_timestamp() - age

    serializer = itsdangerous.URLSafeTimedSerializer(secret, salt="mcp", signer=Dated)
    signed = serializer.make_signer().sign(payload) if isinstance(payload, bytes) else serializer.dumps(payload)
    return signed.decode() if isinstance(signed, bytes) else signed


def token_of(worker_id: str, **kwargs: Any) -> tuple[str, str]:
    """Return the header of a token that names a worker."""
    return TOKEN_HEADER, signed_token({"sid": "a", SESSION_OWNER_KEY: worker_id}, **kwargs)


TOKENS: dict[str, Any] = {
    "mcp_token_header": TOKEN_HEADER,
    "mcp_token_serializer": TokenSerializer("token secret", salt="mcp"),
}
"""The options of an install that reads MCP session tokens."""


@asynccontextmanager
async def fake_owner(socket_dir: Path, behaviour: Callable[..., Any], worker_id: str = "f" * 32) -> AsyncIterator[str]:
    """Stand as a worker that answers each connection with `behaviour(reader, writer)`; yields its cookie.

    A connection that only asks whether anyone listens is no request.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behaviour(reader, writer)
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_unix_server(answer, worker_socket_path(socket_dir, worker_id))
    try:
        yield owned_cookie(worker_id)
    finally:
        server.close()


def leave_stale_socket(socket_dir: Path, worker_id: str) -> None:
    """Leave behind what a killed worker leaves: a socket file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(worker_socket_path(socket_dir, worker_id)))


def open_descriptors() -> int:
    """Return how many file descriptors this process holds."""
    return len(list(Path("/dev/fd").iterdir()))
