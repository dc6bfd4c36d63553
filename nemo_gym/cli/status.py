"""`gym env status`: how the running deployments of this user are doing, once or over and over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any, Final

import orjson
import typer
from rich.live import Live

from nemo_gym.cli.options import AsJson
from nemo_gym.cli.output import result_console, write_json, write_line
from nemo_gym.cli.status_view import StatusView
from nemo_gym.deployment import StopSignals
from nemo_gym.deployment.diagnosis import FindingKind
from nemo_gym.deployment.status import DeploymentStatus, ServerStatus, StatusWatch
from nemo_gym.errors import UsageError

_MAY_PASS: Final = {FindingKind.NOT_RESPONDING, FindingKind.NOT_RUNNING}
_BEFORE_SECOND_LOOK_S: Final = 2.0

STATUS_EPILOG = """\
Examples:

gym env status

gym env status --watch

gym env status --watch --interval 10 --json

The exit code is 1 when a server does not answer, or an error is among the findings; warnings and notes change nothing.
"""


def status(
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=0.1, help="With --watch: seconds between looks; 2 by default.", show_default=False),
    ] = None,
) -> None:
    """Show the running deployments of this user: their servers, their workers, and what is wrong."""
    if watch:
        asyncio.run(_watch(interval or 2.0, as_json=as_json))
    elif interval is not None:
        raise UsageError("--interval goes with --watch")
    found = asyncio.run(_look())
    if as_json:
        write_json([_described(one) for one in found])
    else:
        result_console().print(StatusView(found))
    if not all(one.healthy for one in found):
        raise typer.Exit(1)


async def _look() -> list[DeploymentStatus]:
    """Look once; and a second time where a worker is silent or gone, which for a moment is no trouble."""
    watch = StatusWatch()
    found = await watch.look()
    findings = (finding for one in found for server in one.servers for finding in server.findings)
    if any(finding.kind in _MAY_PASS for finding in findings):
        await asyncio.sleep(_BEFORE_SECOND_LOOK_S)
        found = await watch.look()
    return found


async def _watch(interval: float, *, as_json: bool) -> None:
    """Show one look after another; ends by a signal only, as `Interrupted`."""
    watch, loop = StatusWatch(), asyncio.get_running_loop()
    with ExitStack() as stack:
        async with StopSignals():
            show = _show_json if as_json else _display(stack, interval)
            while True:
                began = loop.time()
                show(await watch.look())
                await asyncio.sleep(max(0.0, began + interval - loop.time()))


def _display(stack: ExitStack, interval: float) -> Callable[[Sequence[DeploymentStatus]], None]:
    """Return what shows a look: in place on a terminal, one below the other elsewhere."""
    console = result_console()
    if not console.is_terminal:
        return lambda found: console.print(StatusView(found, heading=f"\n{_now()}"))
    last: list[StatusView] = []
    # What was seen last stays on the screen after the end.
    stack.callback(lambda: console.print(*last, end=""))
    live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))

    def show(found: Sequence[DeploymentStatus]) -> None:
        heading = f"{_now()}, every {interval:g} s; Ctrl-C ends"
        last[:] = [StatusView(found, heading=_now())]
        live.update(StatusView(found, heading=heading, fits_window=True), refresh=True)

    return show


def _now() -> str:
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"


def _show_json(found: Sequence[DeploymentStatus]) -> None:
    write_line(orjson.dumps([_described(one) for one in found]).decode())


def _described(deployment: DeploymentStatus) -> dict[str, Any]:
    return {
        "record": asdict(deployment.record),
        "health": deployment.health,
        "servers": [_described_server(server) for server in deployment.servers],
        "healthy": deployment.healthy,
    }


def _described_server(server: ServerStatus) -> dict[str, Any]:
    return {
        "name": server.name,
        "kind": server.kind,
        "implementation": server.implementation,
        "url": server.url,
        "num_workers": server.num_workers,
        "health": server.health,
        "figures": None if server.figures is None else server.figures.to_json(),
        "findings": [asdict(finding) for finding in server.findings],
        "rates": {str(pid): asdict(rates) for pid, rates in server.rates.items()},
    }
