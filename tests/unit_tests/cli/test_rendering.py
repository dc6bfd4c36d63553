from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nemo_gym.cli.rendering import RolloutDisplay, ServerDisplay, duration
from nemo_gym.config_types import ServerInstance
from nemo_gym.deployment import ServerEvent
from nemo_gym.rollouts.events import CollectionStarted, RolloutFailed, RolloutFinished, RolloutRunAgain, RolloutStarted

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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=120, highlight=False, _environ={}), stream


def finished(reward: float = 1.0) -> RolloutFinished:
    return RolloutFinished(0, 0, reward, 0.1)


def test_without_a_terminal_progress_is_a_line_now_and_then(clock: Clock) -> None:
    console, stream = make_console(terminal=False)
    with RolloutDisplay(console, clock=clock, seconds_between_lines=10) as display:
        display(CollectionStarted(total=100, already_done=0))
        for _ in range(50):
            clock.now += 0.5
            display(RolloutStarted(0, 0))
            display(finished())
    assert stream.getvalue().splitlines() == [
        "rollouts 20/100  2.0/s  mean reward 1.000  40 s left",
        "rollouts 40/100  2.0/s  mean reward 1.000  30 s left",
    ]


def test_a_run_shorter_than_that_prints_no_progress(clock: Clock) -> None:
    console, stream = make_console(terminal=False)
    with RolloutDisplay(console, clock=clock) as display:
        display(CollectionStarted(total=1, already_done=0))
        display(finished())
    assert stream.getvalue() == ""


def test_on_a_terminal_progress_is_a_bar(clock: Clock) -> None:
    console, stream = make_console(terminal=True)
    with RolloutDisplay(console, clock=clock) as display:
        display(CollectionStarted(total=4, already_done=1))
        clock.now = 2
        display(finished(0.5))
        display(RolloutRunAgain(0, 0, 1, "the session was lost"))
        display(RolloutFailed(1, 0, "timeout", "took too long"))
    text = stream.getvalue()
    assert "1 of 4 rollouts were finished by an earlier run" in text
    assert "3/4" in text
    assert "1.0/s  mean reward 0.500  1 failed  1 run again  1.0 s left" in text


def test_what_an_earlier_run_did_counts_for_the_total_but_not_for_the_rate(clock: Clock) -> None:
    console, _ = make_console(terminal=False)
    display = RolloutDisplay(console, clock=clock)
    display(CollectionStarted(total=100, already_done=90))
    clock.now = 1
    display(finished())
    assert display.state() == "1.0/s  mean reward 1.000  9.0 s left"


def test_only_the_first_failures_are_spelled_out(clock: Clock) -> None:
    console, stream = make_console(terminal=False)
    display = RolloutDisplay(console, clock=clock)
    display(CollectionStarted(total=100, already_done=0))
    for row in range(20):
        display(RolloutFailed(row, 0, "error", f"[reason] {row}" if row else "x" * 1000))
    assert stream.getvalue().splitlines() == [
        f"failed: row 0, rollout 0: {'x' * 400} ...",
        "failed: row 1, rollout 0: [reason] 1",
        "failed: row 2, rollout 0: [reason] 2",
        "(more failures go to the failures file alone)",
    ]


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
