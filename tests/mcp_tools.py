"""A server of many tools, which counts what runs: the tests call them over MCP and over plain HTTP."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, PrivateAttr
from starlette.middleware.base import BaseHTTPMiddleware

from nemo_gym.server_utils import SESSION_ID_KEY
from tests.mcp_support import ToolServer

ORDER: contextvars.ContextVar[str] = contextvars.ContextVar("order")
PNG = b"\x89PNG\r\n\x1a\n\x00\xff"


class Move(BaseModel):
    steps: int
    note: str = ""


class Counted(ToolServer):
    """Counts what runs, and has middleware on both sides of the framework's own."""

    _runs: dict[str, int] = PrivateAttr(default_factory=dict)

    def setup_session_middleware(self, app: FastAPI) -> None:
        app.add_middleware(BaseHTTPMiddleware, dispatch=self._inner)
        super().setup_session_middleware(app)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.add_middleware(BaseHTTPMiddleware, dispatch=self._outer)
        add_tools(app, self._runs)
        return app

    async def _inner(self, request: Request, call_next: Any) -> Response:
        self._runs["inner"] = self._runs.get("inner", 0) + 1
        if request.url.path == "/barred":
            return JSONResponse({"detail": f"barred for {len(request.session[SESSION_ID_KEY])}"}, 451)
        reply: Response = await call_next(request)
        return reply

    async def _outer(self, request: Request, call_next: Any) -> Response:
        self._runs["outer"] = self._runs.get("outer", 0) + 1
        request.state.seen_by = "outer"
        if request.url.path == "/broken_middleware":
            raise LookupError("a middleware broke")
        reply: Response = await call_next(request)
        reply.headers["x-outer"] = "yes"
        return reply


async def dependency(request: Request, x_sent: Annotated[str | None, Header()] = None) -> AsyncIterator[dict[str, Any]]:
    yield {"x_sent": x_sent}


def add_tools(app: FastAPI, runs: dict[str, int]) -> None:
    app.state.greeting = "hello"

    @app.post("/move")
    async def move(body: Move, request: Request) -> dict[str, Any]:
        runs["move"] = runs.get("move", 0) + 1
        return {"moved": body.steps, "note": body.note, "session": request.session[SESSION_ID_KEY]}

    @app.post("/sync")
    def sync(body: Move) -> dict[str, Any]:
        return {"moved": body.steps, "in_main_thread": threading.current_thread() is threading.main_thread()}

    @app.post("/look")
    async def look(
        request: Request,
        given: Annotated[dict[str, Any], Depends(dependency)],
        page: Annotated[int | None, Query()] = None,
    ) -> dict[str, Any]:
        return {
            "headers": sorted(name for name in request.headers),
            "content_type": request.headers["content-type"],
            "cookies": sorted(request.cookies),
            "query": str(request.query_params),
            "page": page,
            "given": given,
            "url": str(request.url),
            "method": request.method,
            "client": request.client is not None and request.client.host,
            "state": request.state.seen_by,
            "app": request.app.state.greeting,
            "root_path": request.scope.get("root_path", ""),
        }

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    @app.post("/read_json")
    async def read_json(body: Annotated[Any, Body()]) -> Response:
        return Response(json.dumps(body), media_type="application/json")

    @app.post("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, {"short": True, "why": ["stout"]}, {"x-tea": "yes"})

    @app.post("/crash")
    async def crash() -> None:
        runs["crash"] = runs.get("crash", 0) + 1
        raise LookupError("its insides")

    @app.post("/cancels_itself")
    async def cancels_itself() -> None:
        runs["cancels_itself"] = runs.get("cancels_itself", 0) + 1
        raise asyncio.CancelledError

    @app.post("/nothing", status_code=204)
    async def nothing() -> None: ...

    @app.post("/redirect")
    async def redirect() -> Response:
        return Response(status_code=303, headers={"location": "/elsewhere"})

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            for number in range(50):
                await asyncio.sleep(0)
                yield f"{number},"

        return StreamingResponse(parts(), media_type="text/plain")

    @app.post("/picture")
    async def picture() -> Response:
        return Response(PNG, media_type="image/png")

    @app.post("/sound")
    async def sound() -> Response:
        return Response(PNG, media_type="audio/wav")

    @app.post("/binary")
    async def binary() -> Response:
        return Response(PNG, media_type="application/x-thing")

    @app.post("/big")
    async def big(megabytes: Annotated[int, Body(embed=True)]) -> Response:
        return Response(b"x" * (megabytes * 2**20), media_type="text/plain")

    @app.post("/write_session")
    async def write_session(request: Request, key: Annotated[str, Body(embed=True)]) -> dict[str, bool]:
        if key == "-":
            request.session.clear()
        else:
            request.session[key] = 1
        return {"done": True}

    @app.post("/same_session")
    async def same_session(request: Request) -> dict[str, bool]:
        request.session[SESSION_ID_KEY] = request.session[SESSION_ID_KEY]
        return {"done": True}

    @app.post("/barred")
    async def barred() -> None: ...

    @app.post("/broken_middleware")
    async def broken_middleware() -> None: ...

    @app.post("/order")
    async def order() -> dict[str, bool]:
        known = ORDER.get("") != ""
        ORDER.set("mine")
        return {"known": known}
