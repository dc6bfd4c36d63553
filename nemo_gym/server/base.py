"""The base of every server: a pydantic model that holds the configuration and builds a FastAPI application.

Construction and `setup_webserver` read no files but the session secret and need no running configuration, so a
server can be built in a test and driven through Starlette's `TestClient`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import reprlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, Final

import orjson
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, PrivateAttr
from starlette.responses import Response

from nemo_gym.config_types import BaseRunServerInstanceConfig
from nemo_gym.server.body_ids import BodySessionMiddleware, BodySessions, body_id_field
from nemo_gym.server.bootstrap import load_process_config, start
from nemo_gym.server.client import ServerClient, close_client
from nemo_gym.server.middleware import SESSION_ID_KEY, ErrorReplyMiddleware, SessionIdMiddleware
from nemo_gym.server.plain_routes import PlainRoute
from nemo_gym.server.secrets import derive_session_key, session_secrets
from nemo_gym.server.session_end import SessionEndReason, SessionEndRules, install_session_end
from nemo_gym.server.session_lives import SessionLives
from nemo_gym.session_routing import SESSION_OWNER_KEY, FrontedApp, SessionCookieMiddleware, SessionCookies

_SHOWN_VALUE_LENGTH: Final = 100
_SHOWN_PROBLEMS: Final = 20
_SECRET_NAME: Final = re.compile(r"api_?key|secret|password|authorization|token\b", re.IGNORECASE)

# Bounded in depth and length, so that a large request isn't written out whole only to be cut.
_shown: Final = reprlib.Repr()
_shown.maxstring = _shown.maxother = _SHOWN_VALUE_LENGTH

logger = logging.getLogger(__name__)


class ServerApp(FrontedApp, FastAPI):
    """The application of a server: FastAPI, with room for the router in front of it."""


class BaseServer(BaseModel):
    """What all servers have: their configuration.

    Attributes:
        config: The settings of this server instance.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    config: BaseRunServerInstanceConfig

    @classmethod
    def config_type(cls) -> type[BaseRunServerInstanceConfig]:
        """Return the type of the settings: the one that the class's field `config` declares."""
        declared = cls.model_fields["config"].annotation
        assert isinstance(declared, type)
        assert issubclass(declared, BaseRunServerInstanceConfig)
        return declared

    @classmethod
    def load_config_from_global_config(cls) -> BaseRunServerInstanceConfig:
        """Return the settings of the server that this process is; see `server.bootstrap`."""
        return load_process_config(cls.config_type())


class SimpleServer(BaseServer):
    """A server with sessions that answers over HTTP.

    Subclasses add routes to the application that `setup_webserver` returns, and start with `run_webserver`.

    Attributes:
        routes_sessions: Whether a session's requests go to the worker that created it, when there are several
            workers. True for servers that keep state per session in memory.
        body_session_field: The field of a request's JSON body that may name the session, for clients that keep no
            cookies, such as `resources_session_id`; None where only cookies and tokens do.
        session_first_path: The route that begins a session; None where any request may.
        session_last_path: The route after which a session is over, for the even placement of sessions on workers;
            None where there is no such route.
        server_client: Calls the other servers of the configuration.
    """

    routes_sessions: ClassVar[bool] = False
    body_session_field: ClassVar[str | None] = None
    session_first_path: ClassVar[str | None] = None
    session_last_path: ClassVar[str | None] = None

    server_client: ServerClient

    _session_keys: list[str] = PrivateAttr(default_factory=list)
    _session_cookies: SessionCookies | None = PrivateAttr(default=None)

    @abstractmethod
    def setup_webserver(self) -> FastAPI:
        """Return the application with its middleware and routes; extend it in subclasses."""

    def create_webserver(self) -> FastAPI:
        """Return an application with what all servers share: sessions, error replies and `GET /health`."""
        app = ServerApp(title=self.config.name or type(self).__name__)
        app.router.route_class = PlainRoute
        app.router.lifespan_context = _closing_client(app.router.lifespan_context)
        app.add_exception_handler(RequestValidationError, self._answer_invalid_request)
        app.add_api_route("/health", _health, methods=["GET"], include_in_schema=False)
        # The last one added is the outermost.
        app.add_middleware(ErrorReplyMiddleware, server_name=self.config.name)
        self.setup_session_middleware(app)
        return app

    def setup_session_middleware(self, app: FastAPI) -> None:
        """Add the signed session cookie and the session id to `app`, and session end where it is configured."""
        # The last one added is the outermost.
        rules = self.session_end_rules()
        lives = None
        if rules is not None:
            lives = SessionLives(self.config.name, self.on_session_end, idle_timeout_s=rules.idle_timeout_s)
            install_session_end(app, lives, rules, grace_s=self.config.shutdown_grace_s)
        app.add_middleware(SessionIdMiddleware)
        if self.body_session_field is not None:
            app.state.body_sessions = BodySessions(self.body_session_field, self.session_keys(), lives)
            app.add_middleware(BodySessionMiddleware, sessions=app.state.body_sessions)
        app.add_middleware(
            SessionCookieMiddleware,
            secret_key=self.session_keys()[0],
            session_cookie=self.get_session_middleware_key(),
            cookies=self._cookies(),
        )

    def get_session_middleware_key(self) -> str:
        """Return the session cookie's name: each server has its own, as all travel along one rollout."""
        return f"{type(self).__name__}___{self.config.name}"

    def session_keys(self) -> list[str]:
        """Return the keys of the session cookie: the first signs, all of them verify."""
        if not self._session_keys:
            self._session_keys = self._derive_session_keys()
        return self._session_keys

    def session_cookies(self, request: Request) -> dict[str, str]:
        """Return the cookie of a request's session, also of one that begins with it, as the reply would set it.

        With it a handler can call its own server within the same session: the call reaches the same worker.
        """
        session = dict(request.session)
        routing = getattr(request.app.state, "session_routing", None)
        if routing is not None:
            session.setdefault(SESSION_OWNER_KEY, routing.worker_id)
        return {self.get_session_middleware_key(): self.sign_session(session)}

    def sign_session(self, session: Mapping[str, Any]) -> str:
        """Return the session cookie's value for a session, as Starlette's `SessionMiddleware` writes it."""
        return self._cookies().sign(session)

    def new_body_session_id(self, request: Request) -> str:
        """Return a new id of the request's session, for bodies to name it by in `body_session_field`.

        It is signed and URL-safe, is routed to this worker, and is valid as long as the session cookie.

        Args:
            request: The request that begins the session, or one of it.
        """
        sessions: BodySessions | None = getattr(request.app.state, "body_sessions", None)
        if sessions is None:
            raise TypeError(f"{type(self).__name__} has no body_session_field, so no body can name a session")
        return sessions.new_id(request.session[SESSION_ID_KEY], getattr(request.app.state, "session_routing", None))

    def session_end_rules(self) -> SessionEndRules | None:
        """Return what begins and ends sessions; None where the server keeps no count of them."""
        return None

    async def on_session_end(self, session_id: str, reason: SessionEndReason) -> None:
        """Release what a session holds; called exactly once per session where `session_end` is configured.

        None of the session's requests is being handled then, and no new one will be: unless the server is stopping
        and one did not end in time. What it raises is logged.

        Args:
            session_id: The session, as in `request.session[SESSION_ID_KEY]`.
            reason: Why it ends.
        """

    def expose(self, app: FastAPI) -> None:
        """Add what has to see all routes of the finished application; called once, before it is served."""

    def session_routing_options(self) -> dict[str, Any]:
        """Return further options for `install_session_routing`."""
        if self.body_session_field is None:
            return {}
        return {"body_ids": body_id_field(self.body_session_field, self.session_keys())}

    def _cookies(self) -> SessionCookies:
        if self._session_cookies is None:
            self._session_cookies = SessionCookies(self.get_session_middleware_key(), self.session_keys())
        return self._session_cookies

    def _derive_session_keys(self) -> list[str]:
        cookie = self.get_session_middleware_key()
        global_config = getattr(self.server_client, "global_config_dict", None)
        secrets = session_secrets(global_config if isinstance(global_config, Mapping) else {})
        return [derive_session_key(secret, cookie) for secret in secrets]

    async def _answer_invalid_request(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = error.errors()
        problems = [_described(problem) for problem in found[:_SHOWN_PROBLEMS]]
        if len(found) > _SHOWN_PROBLEMS:
            problems.append({"loc": [], "msg": f"and {len(found) - _SHOWN_PROBLEMS} more problems", "type": "more"})
        logger.warning("%s: %s %s: invalid request: %s", self.config.name, request.method, request.url.path, problems)
        content = orjson.dumps({"detail": problems}, default=str, option=orjson.OPT_NON_STR_KEYS)
        return Response(content, 422, media_type="application/json")

    @classmethod
    def run_webserver(cls) -> FastAPI | None:
        """Start this class as the server that the process's configuration names; see `server.bootstrap`.

        Returns:
            The application, in a worker process or in a dry run; None after serving has ended.
        """
        return start(cls)


def add_model_route(app: FastAPI, path: str, handler: Callable[..., Any], documented: type[BaseModel]) -> None:
    """Add `POST path`, answered by `handler` with all fields of the model it returns.

    FastAPI alone would cut a reply down to the fields of the declared type, and a subclass's handler often declares
    its base's. The handler's own signature decides what is read from the request.

    Args:
        app: The application.
        path: The route.
        handler: A bound method; returns a model, a JSON-able value, or a ready `Response`. One that is no coroutine
            function runs in a thread, as FastAPI does it.
        documented: The model that the route's documentation shows.
    """
    signature = inspect.signature(handler, eval_str=True)
    is_async = inspect.iscoroutinefunction(handler)
    # A handler may set cookies and a status on a reply that FastAPI gives it for the purpose.
    given = next((name for name, it in signature.parameters.items() if it.annotation is Response), None)

    @functools.wraps(handler)
    async def endpoint(*args: Any, **kwargs: Any) -> Response:
        result = await handler(*args, **kwargs) if is_async else await run_in_threadpool(handler, *args, **kwargs)
        if isinstance(result, Response):
            return result
        if isinstance(result, BaseModel):
            content = result.__pydantic_serializer__.to_json(result)
        else:
            content = orjson.dumps(result, default=jsonable_encoder, option=orjson.OPT_NON_STR_KEYS)
        reply = Response(content, media_type="application/json")
        if given is not None:
            _take_over(reply, kwargs[given])
        return reply

    endpoint.__signature__ = signature.replace(return_annotation=Response)  # type: ignore[attr-defined]
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_model=None,
        responses={200: {"model": documented}},
        name=path.strip("/"),
    )


def _take_over(reply: Response, given: Response) -> None:
    reply.raw_headers.extend(header for header in given.raw_headers if header[0] != b"content-length")
    reply.status_code = given.status_code or reply.status_code


def _closing_client(inner: Callable[[Any], AbstractAsyncContextManager[Any]]) -> Callable[[Any], Any]:
    """Return the lifespan `inner`, FastAPI's own that runs the `startup` and `shutdown` handlers, with ours around."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
        try:
            async with inner(app) as state:
                yield state
        finally:
            await close_client()

    return lifespan


async def _health(request: Request) -> Response:
    if getattr(request.app.state, "waits_for_workers", False):
        return Response(b'{"status":"starting"}', 503, media_type="application/json")
    return Response(b'{"status":"ok"}', media_type="application/json")


def _described(problem: Mapping[str, Any]) -> dict[str, Any]:
    """One validation problem; of the offending value, the beginning, and of a mapping only the names."""
    value = problem.get("input")
    if any(_SECRET_NAME.search(str(part)) for part in problem["loc"]):
        shown = "(not shown)"
    elif isinstance(value, Mapping):
        shown = f"a mapping of {', '.join(str(key)[:_SHOWN_VALUE_LENGTH] for key in list(value)[:10])}"
    else:
        shown = _shown.repr(value)
    if len(shown) > _SHOWN_VALUE_LENGTH:
        shown = f"{shown[:_SHOWN_VALUE_LENGTH]}..."
    return {"loc": list(problem["loc"]), "msg": problem["msg"], "type": problem["type"], "input": shown}
