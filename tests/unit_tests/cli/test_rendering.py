from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_gym.cli.rendering import ServerDisplay, duration
from nemo_gym.config_types import ServerInstance
from nemo_gym.deployment import ServerEvent

INSTANCE = ServerInstance(
    name="counter",
    kind="resources_servers",
    implementation="counter",
    entrypoint="app.py",
    host="127.0.0.1",
    port=4321,
    num_workers=1,
    folder=Path(),
    settings={},
)


def make_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=120, highlight=False, _environ={}), stream


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.02, "0.02 s"),
        (0.44, "0.4 s"),
        (59.4, "59 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (90_000, "25 h 00 min"),
    ],
)
def test_lengths_of_time_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_without_a_terminal_each_server_gets_one_line_when_it_is_ready() -> None:
    console, stream = make_console(terminal=False)
    display = ServerDisplay(console, 1)
    for kind in ("starting", "ready", "stopping", "stopped"):
        display(ServerEvent(kind, INSTANCE, 1.23))
    assert stream.getvalue().splitlines() == [
        "counter ready after 1.2 s at http://127.0.0.1:4321",
        "Stopping the servers",
    ]


@pytest.mark.parametrize("end", ["ready", "failed"])
def test_on_a_terminal_the_display_ends_when_the_start_does(end: str) -> None:
    console, stream = make_console(terminal=True)
    display = ServerDisplay(console, 1)
    display(ServerEvent("starting", INSTANCE, 0.0))
    display(ServerEvent(end, INSTANCE, 1.23))  # type: ignore[arg-type]
    assert f"{end}" in stream.getvalue()
    assert "1.2 s" in stream.getvalue()
    before = len(stream.getvalue())
    console.print("after")
    assert stream.getvalue()[before:] == "after\n"
