"""HAProxy with cookie persistence in front of single-worker servers: what one would set up instead of our routing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import psutil

from benchmarks.harness.run import Run
from benchmarks.harness.servers import (
    MissingToolError,
    Server,
    ServerStarter,
    deployed,
    free_port,
    gym_config,
    running_process,
)

# Connections to the servers are reused by all clients, nothing is logged, the cookie is added to a session's first
# reply only, buffers are large enough for large bodies, and events are not held back to be sent with others.
CONFIG: Final = """\
global
  nbthread {threads}
  maxconn 4000
  tune.bufsize 65536
defaults
  mode http
  timeout connect 10s
  timeout client 10m
  timeout server 10m
  option http-keep-alive
  option http-no-delay
  http-reuse always
frontend front
  bind 127.0.0.1:{port}
  default_backend counters
backend counters
  balance roundrobin
  cookie SERVERID insert indirect nocache
{servers}
"""


_START_S: Final = 20.0
_PAUSE_S: Final = 0.05


def haproxy_before(component: str, count: int, *, threads: int = 1) -> ServerStarter:
    """Return what starts HAProxy in front of `count` processes of one of our resources servers.

    One thread of it costs less than two on two cores, and is far from being the bottleneck of small requests.
    """

    @asynccontextmanager
    async def start(run: Run) -> AsyncIterator[Server]:
        program = find_haproxy()
        names = [f"counter_{number}" for number in range(count)]
        config = gym_config(run, {name: (component, {"num_workers": 1}) for name in names})
        async with deployed(run, config) as deployment:
            instances = [server.instance for server in deployment.servers]
            port = free_port()
            lines = [f"  server {it.name} {it.host}:{it.port} cookie {it.name}" for it in instances]
            path = run.folder / "work" / f"haproxy-{port}.cfg"
            path.write_text(CONFIG.format(port=port, threads=threads, servers="\n".join(lines)))
            async with running_process(run, [program, "-db", "-f", str(path)]) as pid:
                await _accepts(port, pid)
                pids = [server.pid for server in deployment.servers if server.pid is not None]
                as_dict = json.loads(config.to_json())
                # A client of ours that asks for the first server asks HAProxy.
                as_dict[names[0]]["resources_servers"][component].update(host="127.0.0.1", port=port)
                yield Server("127.0.0.1", port, [pid, *pids], pids, config=as_dict, name=names[0])

    return start


def find_haproxy() -> str:
    """Return the program's path.

    Raises:
        MissingToolError: It is not installed.
    """
    found = shutil.which("haproxy", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
    if found is None:
        raise MissingToolError("haproxy is not installed (Debian and Ubuntu: apt install haproxy); left out")
    return found


async def _accepts(port: int, pid: int) -> None:
    give_up = time.monotonic() + _START_S
    while psutil.pid_exists(pid) and time.monotonic() < give_up:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(_PAUSE_S)
        else:
            writer.close()
            return
    raise ChildProcessError("haproxy did not start")
