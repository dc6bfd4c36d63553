"""The routes of the dashboard: the page, the files that it is made of, and what it shows as JSON.

Only GET and HEAD. The page may load from, and talk to, its own origin only, and may not be put into another page; the
browser holds it to that, and to never reading text as HTML.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

CONTENT_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}
PAGE: Final = "index.html"


def dashboard_routes(look: Callable[[], tuple[str, bytes]]) -> list[BaseRoute]:
    """Return the routes of the dashboard.

    Args:
        look: Returns the entity tag and the text of the JSON document to show.
    """
    static = _static_files()

    async def page(request: Request) -> Response:
        return _reply(request, *static[PAGE])

    async def file(request: Request) -> Response:
        found = static.get(request.path_params["name"])
        return Response("No such file.\n", 404, HEADERS, "text/plain") if found is None else _reply(request, *found)

    async def data(request: Request) -> Response:
        return _reply(request, *look(), "application/json")

    return [
        Route("/", page, methods=["GET"]),
        Route("/dashboard", page, methods=["GET"]),
        Route("/dashboard/data", data, methods=["GET"]),
        Route("/dashboard/static/{name}", file, methods=["GET"]),
    ]


def _reply(request: Request, tag: str, body: bytes, content_type: str) -> Response:
    headers = {**HEADERS, "ETag": tag}
    known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "Content-Type": content_type})


def _static_files() -> dict[str, tuple[str, bytes, str]]:
    """Return entity tag, content and content type of each file, by its name. Blocks shortly."""
    found = {}
    for file in files("nemo_gym.dashboard").joinpath("static").iterdir():
        content_type = CONTENT_TYPES.get(f".{file.name.rpartition('.')[2]}")
        if content_type is not None:
            content = file.read_bytes()
            found[file.name] = (f'"{hashlib.sha256(content).hexdigest()[:16]}"', content, content_type)
    return found
