"""From a process's configuration to a serving application: one process, or a main process with workers.

A server process is started as `python app.py` with the whole configuration and its instance's name in the
environment. With one worker it serves by itself. With more it becomes the main process of uvicorn's supervisor:
the workers are spawned, or forked where the launcher has left a template, import the entrypoint as `__mp_main__`, and
take its module-level `app`, or have one built from the server's class. Each builds its application exactly once.

Lifecycle: the process ends on SIGTERM or SIGINT after the requests in flight, or a grace period, have ended. It also
ends when its parent is gone, however that ended; workers likewise follow their main process.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf
from pydantic import ValidationError
from uvicorn.config import STARTUP_FAILURE

from nemo_gym.config_types import SERVER_KINDS, BaseRunServerInstanceConfig
from nemo_gym.errors import ERROR_STANDS_ABOVE, ConfigError, NemoGymError, ServerStartError
from nemo_gym.global_config import (
    DRY_RUN_KEY_NAME,
    NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME,
    get_first_server_config_dict,
    get_global_config_dict,
)
from nemo_gym.logs import name_worker
from nemo_gym.server.client import ServerClient
from nemo_gym.server.fellows import install_figures
from nemo_gym.server.limits import raise_descriptor_limit
from nemo_gym.server.middleware import SESSION_ID_KEY, DisconnectMiddleware, LogContextMiddleware, put_outermost
from nemo_gym.server.process_log import set_up_server_log
from nemo_gym.server.recorder import FIGURES_PATHS, Recorder
from nemo_gym.server.session_end import SESSIONLESS_PATHS, check_close_route
from nemo_gym.server.session_lives import SessionLives
from nemo_gym.server.socket_records import recorded_socket_dir
from nemo_gym.server.supervisor import Supervisor
from nemo_gym.server.template import WorkerTemplate
from nemo_gym.server.tracing import start_tracing, trace_hops
from nemo_gym.server.worker_env import WorkerEnv, take_parent_pipe
from nemo_gym.server.worker_slots import WorkerSlots
from nemo_gym.session_routing import (
    Placement,
    create_socket_dir,
    install_session_routing,
    remove_socket_dir,
    sweep_stale_socket_dirs,
)

# Longer than any client of ours keeps an idle connection: the client closes first.
_KEEP_ALIVE_S: Final = 75
# Added to three times the grace of a stop (see `Supervisor`), before a process whose parent is gone ends by force.
_ORPHAN_MARGIN_S: Final = 5
# Objects made and not freed before the garbage collector looks for cycles among them. The thousands that hundreds of
# open requests hold are no garbage; a request itself leaves no cycles.
_GC_THRESHOLD: Final = 10_000
# Bytes of the largest block that the C library is to take for usual: some parts of bodies, for a few requests at once.
_USUAL_BLOCK: Final = 2**22

_LATE_IMPORTS: Final = "nemo_gym.server.late_imports"

logger = logging.getLogger(__name__)


class RunnableServer(Protocol):
    """What the bootstrap needs of a server; `SimpleServer` has it."""

    routes_sessions: ClassVar[bool]
    session_first_path: ClassVar[str | None]
    session_last_path: ClassVar[str | None]

    def __init__(self, **fields: Any) -> None: ...

    @classmethod
    def config_type(cls) -> type[BaseRunServerInstanceConfig]:
        """Return the type of the server's settings."""
        ...

    def setup_webserver(self) -> FastAPI:
        """Return the application."""
        ...

    def expose(self, app: FastAPI) -> None:
        """Add what has to see all routes of the finished application."""
        ...

    def session_routing_options(self) -> dict[str, Any]:
        """Return further options for `install_session_routing`."""
        ...

    def get_session_middleware_key(self) -> str:
        """Return the session cookie's name."""
        ...

    def session_keys(self) -> Sequence[str]:
        """Return the session cookie's keys, the signing one first."""
        ...


def start(server_class: type[RunnableServer]) -> FastAPI | None:
    """Serve `server_class` as this process's configuration says.

    Returns:
        The application, without serving it, in a worker process and in a dry run; else None once serving has ended.

    On a configuration error, or an address that can't be bound, the process ends with the error's text alone.
    """
    set_up_server_log()
    if WorkerEnv.read() is not None:
        return _build_or_give_up(server_class)
    try:
        config = load_process_config(server_class.config_type())
        if get_global_config_dict().get(DRY_RUN_KEY_NAME):
            return build_app(server_class)
        _serve(server_class, config)
    except NemoGymError as error:
        logger.error("%s", " ".join(str(error).splitlines()))  # noqa: TRY400
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        # uvicorn raises the signal again after its graceful end.
        sys.exit(128 + signal.SIGINT)
    except Exception:
        logger.exception("%s failed", server_class.__name__)
        sys.exit(1)
    return None


def load_process_config(config_type: type[BaseRunServerInstanceConfig]) -> BaseRunServerInstanceConfig:
    """Return this process's server settings as a `config_type`.

    Raises:
        ConfigError: If there is no configuration, or the settings don't fit the type.
    """
    name = os.environ.get(NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME)
    if not name:
        raise ConfigError(
            f"{NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME} is not set: this process doesn't know which server it is",
            hint="Servers are started by `gym env start` or `gym eval run`.",
        )
    settings = OmegaConf.to_container(get_first_server_config_dict(get_global_config_dict(), name), resolve=True)
    assert isinstance(settings, dict)
    try:
        return config_type.model_validate({**settings, "name": name})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in (name, *first["loc"]))
        raise ConfigError(f"{first['msg']} (settings of type {config_type.__name__})", key=key) from error


def build_app(server_class: type[RunnableServer]) -> FastAPI:
    """Return the application of `server_class`, ready to be served in this process."""
    importlib.import_module(_LATE_IMPORTS)
    global_config = get_global_config_dict()
    config = load_process_config(server_class.config_type())
    tracing = start_tracing(global_config, config.name)
    server = server_class(config=config, server_client=ServerClient.from_config(global_config, tracing=tracing))
    app = server.setup_webserver()
    # Once more: the user's code may have put something in its place.
    set_up_server_log()
    check_close_route(app, config.name)
    server.expose(app)
    worker = WorkerEnv.read()
    socket_dir = None if worker is None else worker.socket_dir
    recorder = None
    if config.figures:
        recorder = Recorder(_placement(server, app) if server.routes_sessions else None, socket_dir)
        kinds = [kind for kind in SERVER_KINDS if kind in global_config.get(config.name, ())]
        install_figures(app, recorder, config, "".join(kinds[:1]), serves_socket=not server.routes_sessions)
    else:
        app.add_middleware(DisconnectMiddleware)
    worker_id = None if recorder is None or socket_dir is None else recorder.worker_id
    if server.routes_sessions and socket_dir is not None:
        worker_id = install_session_routing(
            app,
            socket_dir=socket_dir,
            session_cookie=server.get_session_middleware_key(),
            secret_key=list(server.session_keys()),
            grace=config.shutdown_grace_s,
            hop=config.session_hop,
            placement=_placement(server, app) if config.session_placement == "least_loaded" else None,
            hop_durations=None if recorder is None else recorder.hop_durations,
            any_worker_paths=frozenset() if recorder is None else FIGURES_PATHS,
            **server.session_routing_options(),
        )
    if worker_id is not None:
        name_worker(worker_id[:8])
    if worker is not None:
        app.state.waits_for_workers = worker.is_starting
    if tracing is not None:
        put_outermost(app, tracing.middleware)
        trace_hops(app, tracing, worker_id)
    # Outside of the traces: what they log at their end is told, too.
    put_outermost(app, LogContextMiddleware)
    app.state.built_by_nemo_gym = True
    return app


def _settle_memory() -> None:
    """Make memory cheap for what is to be served, once the application stands."""
    # The collector then passes over what start-up made, and looks seldom at what requests make.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    # glibc takes the largest block freed so far for what is usual, and gives back what is free beyond twice that:
    # after each part of a body, were it not for this one.
    bytearray(_USUAL_BLOCK)


def _placement(server: RunnableServer, app: FastAPI) -> Placement:
    lives: SessionLives | None = getattr(app.state, "session_lives", None)
    return Placement(
        session_key=SESSION_ID_KEY,
        first_path=server.session_first_path,
        last_path=server.session_last_path,
        ignored_paths=SESSIONLESS_PATHS,
        when_ended=None if lives is None else lives.when_gone,
    )


def worker_app() -> FastAPI:
    """Return the application that a worker serves: the entrypoint's `app`, else one built from the server's class.

    The entrypoint's is what `run_webserver` returned there.

    uvicorn calls this in each worker, after the entrypoint has been imported there as `__mp_main__`.
    """
    worker = WorkerEnv.read()
    assert worker is not None, "worker_app is for the workers that the bootstrap starts"
    set_up_server_log()
    raise_descriptor_limit()
    _follow_main_process(load_process_config(BaseRunServerInstanceConfig).shutdown_grace_s)
    entrypoint = sys.modules["__main__"]
    app = getattr(entrypoint, "app", None)
    # Another `app`, not of `run_webserver`, would serve sessions without their owner.
    if isinstance(app, FastAPI) and getattr(app.state, "built_by_nemo_gym", False):
        return app
    module_name, _, qualified_name = worker.server_class.partition(":")
    found: Any = entrypoint if module_name == "__main__" else importlib.import_module(module_name)
    for part in qualified_name.split("."):
        found = getattr(found, part)
    return _build_or_give_up(found)


def _build_or_give_up(server_class: type[RunnableServer]) -> FastAPI:
    """Build a worker's application, or end with the error's text; the supervisor decides what follows."""
    try:
        app = build_app(server_class)
    except NemoGymError as error:
        logger.error("%s", " ".join(str(error).splitlines()))  # noqa: TRY400
        sys.exit(STARTUP_FAILURE)
    except Exception:
        logger.exception("%s can't be built", server_class.__name__)
        sys.exit(STARTUP_FAILURE)
    _settle_memory()
    return app


def is_nemo_gym_fastapi_entrypoint(file: str) -> bool:
    """Whether the module in `file` is being imported by a worker to have its `app` taken.

    True once in each worker. Another import of the same file under its own name is an ordinary import.

    Args:
        file: The module's `__file__`.
    """
    worker = WorkerEnv.read()
    if worker is None or Path(file).resolve() != worker.entrypoint:
        return False
    return sys._getframe(1).f_globals.get("__name__") == "__mp_main__"


def _serve(server_class: type[RunnableServer], config: BaseRunServerInstanceConfig) -> None:
    parent_pipe = take_parent_pipe()
    if parent_pipe is not None:
        # The parent gave this process a group of its own, so the force hits nothing else.
        _follow(
            lambda: os.read(parent_pipe, 1),
            lambda: os.killpg(0, signal.SIGKILL),
            "the parent process is gone",
            config.shutdown_grace_s,
        )
    raise_descriptor_limit()
    sock = _bind(config)
    workers = config.num_workers or 1
    template = WorkerTemplate.take()
    if workers == 1:
        if template is not None:
            template.close()
        server = uvicorn.Server(_uvicorn_config(build_app(server_class), config))
        _settle_memory()
        try:
            server.run(sockets=[sock])
        except SystemExit as error:
            if server.started:
                raise
            raise ServerStartError(f"{config.name} could not start; {ERROR_STANDS_ABOVE}") from error
        return
    with (
        _worker_env(server_class, config) as socket_dir,
        # Clients go straight to the workers for the sake of sessions alone.
        recorded_socket_dir(config.host, config.port, socket_dir if server_class.routes_sessions else None),
    ):
        uvicorn_config = _uvicorn_config(f"{__name__}:{worker_app.__name__}", config, factory=True, workers=workers)
        supervisor = Supervisor(uvicorn_config, [sock], template, WorkerSlots(socket_dir))
        supervisor.run()
    if supervisor.startup_failed:
        raise ServerStartError(f"a worker of {config.name} could not start; {ERROR_STANDS_ABOVE}")


@contextmanager
def _worker_env(server_class: type[RunnableServer], config: BaseRunServerInstanceConfig) -> Iterator[Path | None]:
    """Leave the workers' variables, and the folder of their sockets, for as long as they run; yields the folder."""
    socket_dir = None
    if server_class.routes_sessions or config.figures:
        # What a main process left that was killed.
        sweep_stale_socket_dirs()
        try:
            socket_dir = create_socket_dir()
        except ConfigError as error:
            if server_class.routes_sessions:
                raise
            logger.warning("%s: the worker that answers shows its own figures alone: %s", config.name, error)
    module = sys.modules["__main__"]
    WorkerEnv(
        entrypoint=Path(getattr(module, "__file__", None) or "").resolve(),
        server_class=f"{server_class.__module__}:{server_class.__qualname__}",
        socket_dir=socket_dir,
    ).write()
    try:
        yield socket_dir
    finally:
        WorkerEnv.clear()
        if socket_dir is not None:
            remove_socket_dir(socket_dir)


def _uvicorn_config(app: FastAPI | str, config: BaseRunServerInstanceConfig, **kwargs: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=config.shutdown_grace_s,
        timeout_worker_healthcheck=config.worker_health_timeout_s,
        proxy_headers=False,
        **kwargs,
    )


def _bind(config: BaseRunServerInstanceConfig) -> socket.socket:
    """Return the listening socket's address bound, or say whose port is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. Without it a reply written in pieces on a kept-alive connection waits for the
    # client's delayed acknowledgement, 40 ms (uvicorn issue 3149).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise ServerStartError(
            f"{config.name} can't listen on {config.host}:{config.port}: {error.strerror}.\n"
            f"Stop what uses that port, or choose another `port` for {config.name} (left out, a free one is taken)."
        ) from error
    sock.set_inheritable(True)
    return sock


def _follow_main_process(grace_s: float) -> None:
    # A forked worker has the pipe. A spawned one is a process of multiprocessing.
    main_process = take_parent_pipe()
    if main_process is None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        main_process = parent.sentinel
    _follow(
        lambda: multiprocessing.connection.wait([main_process]),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "the main process is gone",
        grace_s,
    )


def _follow(wait_for_end: Callable[[], object], force: Callable[[], None], reason: str, grace_s: float) -> None:
    """End this process gracefully when `wait_for_end` returns, and by `force` when that takes too long."""

    def watch() -> None:
        wait_for_end()
        logger.warning("Stopping: %s", reason)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3 * grace_s + _ORPHAN_MARGIN_S)
        force()

    threading.Thread(target=watch, name="follow-parent", daemon=True).start()
