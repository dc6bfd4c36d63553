"""The head server: the one address of a deployment, from which its configuration and servers are learned.

It runs in the parent process, on that process's event loop, for as long as the deployment does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import orjson
import uvicorn
from fastapi import FastAPI
from omegaconf import ListConfig, OmegaConf
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from nemo_gym.config_types import BaseServerConfig, server_url
from nemo_gym.errors import ConfigError, ServerStartError
from nemo_gym.global_config import HEAD_SERVER_KEY_NAME, GlobalConfig
from nemo_gym.server.host_header import HostGuard, name_in

ALLOWED_HOSTS_KEY: Final = "allowed_hosts"


class HeadServer:
    """Serves what a deployment consists of.

    The configuration holds API keys: the head server listens on loopback unless configured otherwise.

    Args:
        config: Where it listens.
        global_config: The deployment's resolved configuration.
    """

    def __init__(self, config: BaseServerConfig, global_config: GlobalConfig) -> None:
        self.config = config
        self.global_config = global_config
        self._yaml = orjson.dumps(OmegaConf.to_yaml(global_config.config_dict))

    def setup_webserver(self) -> FastAPI:
        """Return the application with the head server's routes."""
        app = FastAPI(title="head_server", openapi_url=None)
        for path, handler in (
            ("/health", self.health),
            ("/global_config_dict_yaml", self.global_config_dict_yaml),
            ("/server_instances", self.server_instances),
            ("/prometheus_targets", self.prometheus_targets),
        ):
            app.add_api_route(path, handler, methods=["GET"], response_model=None)
        return app

    async def health(self) -> dict[str, str]:
        """Answer that the head server serves."""
        return {"status": "ok"}

    async def global_config_dict_yaml(self) -> Response:
        """Answer the resolved configuration: a JSON string that holds YAML."""
        return Response(self._yaml, media_type="application/json")

    async def server_instances(self) -> list[dict[str, Any]]:
        """Answer a list of the servers: name, kind, implementation, address and number of workers."""
        return [
            {
                "name": instance.name,
                "kind": instance.kind,
                "implementation": instance.implementation,
                "url": instance.url,
                "num_workers": instance.num_workers,
            }
            for instance in self.global_config.instances.values()
        ]

    async def prometheus_targets(self) -> list[dict[str, Any]]:
        """Answer where the servers' `/metrics` are, as Prometheus reads it (`http_sd_configs`)."""
        addresses = [instance.url.partition("://")[2] for instance in self.global_config.instances.values()]
        return [{"targets": addresses, "labels": {}}]


def application(head: HeadServer, routes: Sequence[BaseRoute] = ()) -> ASGIApp:
    """Return the head server's application with further routes, guarded against DNS rebinding.

    Args:
        head: The head server.
        routes: Served after its own.

    Raises:
        ConfigError: `head_server.allowed_hosts` is no list of names.
    """
    app = head.setup_webserver()
    app.router.routes.extend(routes)
    key = f"{HEAD_SERVER_KEY_NAME}.{ALLOWED_HOSTS_KEY}"
    hosts = head.global_config.config_dict[HEAD_SERVER_KEY_NAME].get(ALLOWED_HOSTS_KEY) or ListConfig([])
    if not isinstance(hosts, ListConfig) or not all(isinstance(host, str) and name_in(host) for host in hosts):
        raise ConfigError("expected a list of names such as ['node17.example'], or ['*'] for any", key=key)
    own = server_url(head.config.host, head.config.port)
    return HostGuard(app, head.config.host, hosts, f"Use {own}, or allow the name with `{key}`.")


@asynccontextmanager
async def running_head_server(
    global_config: GlobalConfig, routes: Sequence[BaseRoute] = ()
) -> AsyncIterator[HeadServer]:
    """Serve the head server on the running event loop while the context is open.

    Args:
        global_config: The deployment's resolved configuration.
        routes: Further routes to serve.

    Raises:
        ConfigError: `head_server.allowed_hosts` is no list of names.
        ServerStartError: If its address can't be bound.
    """
    settings = global_config.config_dict[HEAD_SERVER_KEY_NAME]
    config = BaseServerConfig(host=settings["host"], port=settings["port"])
    head = HeadServer(config, global_config)
    app = application(head, routes)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
            # Whoever connects before the server accepts waits instead of being refused.
            sock.listen()
        except OSError as error:
            raise ServerStartError(
                f"the head server can't listen on {config.host}:{config.port}: {error.strerror}.\n"
                f"Stop what uses that port, or choose another `{HEAD_SERVER_KEY_NAME}.port`."
            ) from error
        server = _QuietServer(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            yield head
        finally:
            server.should_exit = True
            await serving


class _QuietServer(uvicorn.Server):
    """A server within a program that handles signals itself."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()
