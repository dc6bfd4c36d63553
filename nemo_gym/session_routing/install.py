"""The public door: session routing added to an application, after its `SessionMiddleware`.

The router becomes the outermost middleware so far, and sessions are stamped just inside `SessionMiddleware`. What is
added later stands outside the router: right for error replies and the handling of client disconnects, wrong for all
that reads or writes the session. A `FrontedApp` has the router in front of it instead, outside every middleware.

The application's lifespan must run (it does under uvicorn, unless `lifespan="off"`), because the private server starts
and stops with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

from starlette.applications import Starlette
from starlette.datastructures import Secret
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp

from nemo_gym.session_routing.body_field import BodyIdField
from nemo_gym.session_routing.durations import Durations
from nemo_gym.session_routing.forwarding import HopName
from nemo_gym.session_routing.front import FrontedApp
from nemo_gym.session_routing.held_sessions import Placement
from nemo_gym.session_routing.ownership import SessionOwnerMiddleware, TokenSerializer, new_worker_id
from nemo_gym.session_routing.placement import Placer
from nemo_gym.session_routing.router import SessionRoutingMiddleware, secrets_of
from nemo_gym.session_routing.session_cookie import FOURTEEN_DAYS, SessionCookies


class RouterOptions(TypedDict, total=False):
    """Options that `SessionRoutingMiddleware` has, and describes."""

    mcp_errors_as_jsonrpc: bool
    body_ids: BodyIdField | None
    hop: HopName
    hop_durations: Durations | None
    any_worker_paths: Collection[str]


def install_session_routing(
    app: Starlette,
    *,
    socket_dir: Path | str,
    session_cookie: str,
    secret_key: str | Secret | Sequence[str],
    max_age: int | None = FOURTEEN_DAYS,
    mcp_token_header: str | None = None,
    mcp_token_serializer: TokenSerializer | None = None,
    mcp_path: str = "/mcp",
    grace: int | None = 10,
    placement: Placement | None = None,
    **options: Unpack[RouterOptions],
) -> str:
    """Make an application's sessions stay with the worker that created them: once in each worker process.

    Args:
        app: The application, not yet started.
        socket_dir: The directory of the workers' sockets, made by `create_socket_dir` in the main process.
        session_cookie: Name of the session middleware's cookie.
        secret_key: The session middleware's secret, or several: it and others whose cookies are accepted too.
        max_age: The session middleware's, in seconds.
        mcp_token_header: Name of the header that carries an MCP session token, if any.
        mcp_token_serializer: Reads that token; its payload is a mapping with `SESSION_OWNER_KEY`.
        mcp_path: Where, and below which, the token decides even if the request has a session cookie.
        grace: Seconds that requests received from other workers may take when this worker stops.
        placement: Lets new sessions begin at the least loaded worker; None keeps them where they arrive.
        **options: Further options of `SessionRoutingMiddleware`.

    Returns:
        This worker's id, which an MCP session token must carry under `SESSION_OWNER_KEY`.

    Raises:
        ValueError: There is no `SessionMiddleware` yet, or it has another cookie, secret or age.
    """
    position = _session_middleware_position(app, session_cookie, secrets_of(secret_key)[0], max_age)
    worker_id, placer = _stamp_sessions(app, position + 1, placement, socket_dir)
    make_router = functools.partial(
        SessionRoutingMiddleware,
        socket_dir=socket_dir,
        worker_id=worker_id,
        session_cookie=session_cookie,
        secret_key=secret_key,
        max_age=max_age,
        mcp_token_header=mcp_token_header,
        mcp_token_serializer=mcp_token_serializer,
        mcp_path=mcp_path,
        grace=grace,
        cookies=_cookies_of(app.user_middleware[position]),
        placer=placer,
        **options,
    )
    _add_router(app, make_router)
    return worker_id


def _add_router(app: Starlette, make_router: Callable[[ASGIApp], SessionRoutingMiddleware]) -> None:
    if isinstance(app, FrontedApp):
        app.state.session_routing = app.put_in_front(make_router)
    else:
        app.add_middleware(make_router)


def _stamp_sessions(
    app: Starlette, position: int, placement: Placement | None, socket_dir: Path | str
) -> tuple[str, Placer | None]:
    """Add the middleware that stamps sessions with a new worker id; return that, and what counts the sessions."""
    worker_id = new_worker_id()
    placer = Placer(placement, socket_dir, worker_id) if placement else None
    counter = placer.sessions if placer else None
    app.user_middleware.insert(position, Middleware(SessionOwnerMiddleware, worker_id=worker_id, counter=counter))
    return worker_id, placer


def _cookies_of(middleware: Middleware) -> SessionCookies | None:
    """Return what a session middleware of ours knows of its cookies, for the router to share."""
    cookies = middleware.kwargs.get("cookies")
    return cookies if isinstance(cookies, SessionCookies) else None


def _session_middleware_position(app: Starlette, cookie: str, secret: str, max_age: int | None) -> int:
    stack = app.user_middleware
    found = [i for i, m in enumerate(stack) if isinstance(m.cls, type) and issubclass(m.cls, SessionMiddleware)]
    if not found:
        raise ValueError("add SessionMiddleware before install_session_routing")
    position = found[-1]
    middleware = stack[position]
    bound = inspect.signature(middleware.cls).bind(app, *middleware.args, **middleware.kwargs)
    bound.apply_defaults()
    ours = {"session_cookie": cookie, "secret_key": secret, "max_age": max_age}
    for name, value in ours.items():
        theirs = bound.arguments.get(name, value)
        if (str(theirs) if name == "secret_key" else theirs) != value:
            raise ValueError(f"install_session_routing and SessionMiddleware must have the same {name}")
    return position
