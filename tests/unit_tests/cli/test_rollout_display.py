"""What is shown of a run while it goes on, frame by frame and through the thread that shows it."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from collections.abc import Callable

import pytest
from rich.console import Console

from nemo_gym.cli.rollout_display import RolloutDisplay
from nemo_gym.rollouts.events import (
    CollectionStarted,
    RolloutEvent,
    RolloutFailed,
    RolloutFinished,
    RolloutRunAgain,
    RolloutStarted,
)
from nemo_gym.rollouts.tally import RunTally

REASON = "y" * 100_000
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Bench:
    """A display on a console in memory, by a clock that the test turns; frames are shown when the test says so."""

    def __init__(
        self, *, terminal: bool, width: int = 100, term: str = "xterm", stream: io.StringIO | None = None
    ) -> None:
        self.now = 0.0
        self.stream = stream or io.StringIO()
        self.tally = RunTally(clock=lambda: self.now)
        console = Console(
            file=self.stream, force_terminal=terminal, width=width, highlight=False, _environ={"TERM": term}
        )
        self.display = RolloutDisplay(console, self.tally)

    def count(self, *events: RolloutEvent) -> None:
        """Tell the tally alone: no thread is started."""
        for event in events:
            self.tally(event)

    def make(self, count: int, seconds: float, reward: float = 1.0) -> None:
        """Make rollouts one after the other."""
        for _ in range(count):
            self.count(RolloutStarted(0, 0))
            self.now += seconds
            self.count(RolloutFinished(0, 0, reward, seconds))

    @property
    def text(self) -> str:
        return CONTROL.sub("", self.stream.getvalue())


@pytest.fixture
def pipe() -> Bench:
    return Bench(terminal=False)


def test_without_a_terminal_progress_is_a_line_now_and_then(pipe: Bench) -> None:
    pipe.count(CollectionStarted(total=100, already_done=0))
    for _ in range(50):
        pipe.make(1, 0.5)
        pipe.display.show()
    assert [line.split("  about ")[0] for line in pipe.text.splitlines()] == [
        "rollouts 20/100  2/s  mean reward 1.000",
        "rollouts 40/100  2/s  mean reward 1.000",
    ]


def test_lines_come_less_often_in_a_long_run(pipe: Bench) -> None:
    pipe.count(CollectionStarted(total=10**6, already_done=0))
    for _ in range(24 * 60 * 60 // 20):
        pipe.now += 20
        pipe.display.show()
    assert 1000 < len(pipe.text.splitlines()) < 1500, "in a day"


def test_a_run_that_stands_still_says_so(pipe: Bench) -> None:
    pipe.count(CollectionStarted(total=10, already_done=0), RolloutStarted(0, 0), RolloutStarted(1, 0))
    pipe.now = 200
    pipe.display.show()
    assert pipe.text == "rollouts 0/10  0/s  2 running, for 3 min 20 s at most\n"


def test_trouble_and_what_an_earlier_run_did_are_told(pipe: Bench) -> None:
    pipe.count(CollectionStarted(total=10, already_done=4))
    pipe.make(1, 1.0, reward=0.5)
    pipe.count(
        RolloutRunAgain(1, 0, 1, "the session was lost", "session_lost"),
        RolloutRunAgain(2, 0, 1, "the connection broke", "connection_lost"),
        RolloutFailed(3, 0, "timeout", "took too long"),
    )
    assert pipe.display.state() == (
        "rollouts 6/10  2/s  mean reward 0.500  1 failed  2 run again (1 for a lost session)"
    )


def test_the_time_left_is_told_once_enough_rollouts_have_ended(pipe: Bench) -> None:
    pipe.count(CollectionStarted(total=100, already_done=0))
    pipe.make(3, 1.0)
    pipe.count(RolloutStarted(5, 0))
    pipe.display.show()
    assert "left" not in pipe.display.state()
    pipe.count(RolloutFinished(5, 0, 1.0, 0.0))
    pipe.make(45, 1.0)
    pipe.count(RolloutStarted(5, 0))
    pipe.display.show()
    assert re.search(r"about (4\d|5\d) s left$", pipe.display.state())


@pytest.mark.parametrize("width", [40, 100])
def test_on_a_terminal_progress_is_a_bar_and_the_cursor_comes_back(width: int) -> None:
    bench = Bench(terminal=True, width=width)
    bench.count(CollectionStarted(total=4, already_done=1))
    bench.make(1, 2.0, reward=0.5)
    bench.count(RolloutFailed(1, 0, "timeout", "took too long"), RolloutStarted(2, 0))
    bench.display.show()
    with bench.display:
        pass
    bench.display.show()
    text = " ".join(bench.text.split())
    for told in ("3/4", "75 %", "1/s mean reward 0.500 1 running", "1 failed"):
        assert told in text
    assert bench.stream.getvalue().rindex("\x1b[?25h") > bench.stream.getvalue().rindex("\x1b[?25l")


def test_a_narrow_terminal_cuts_no_number() -> None:
    bench = Bench(terminal=True, width=20)
    bench.count(CollectionStarted(total=123_456, already_done=100_000))
    bench.display.show()
    assert "rollouts" in bench.text.split()
    assert "100000/123456" in bench.text.split()


def test_a_terminal_that_can_not_move_its_cursor_gets_lines() -> None:
    bench = Bench(terminal=True, term="dumb")
    bench.count(CollectionStarted(total=4, already_done=0), RolloutStarted(0, 0))
    bench.now = 20
    bench.display.show()
    assert bench.stream.getvalue() == "rollouts 0/4  0/s  1 running, for 20 s at most\n"


def test_results_go_past_a_display_that_hangs() -> None:
    bench = Bench(terminal=True)
    bench.count(CollectionStarted(total=4, already_done=0))
    stdout = sys.stdout
    bench.display.show()
    assert sys.stdout is stdout
    with bench.display:
        pass
    bench.display.show()


def test_the_last_frame_is_shown_although_the_run_ended_while_the_one_before_was_written() -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            if "1/4" in text:
                with bench.display:
                    bench.make(3, 1.0)
            return super().write(text)

    bench = Bench(terminal=True, stream=Slow())
    bench.count(CollectionStarted(total=4, already_done=1))
    bench.display.show()
    bench.display.show()
    assert bench.text.splitlines()[-2].split("  ")[-2:] == ["4/4", "100 %"]
    assert bench.stream.getvalue().endswith("\x1b[?25h")


def test_nothing_is_live_where_nothing_is_left_to_make() -> None:
    bench = Bench(terminal=True)
    bench.count(CollectionStarted(total=4, already_done=4))
    bench.display.show()
    assert bench.stream.getvalue() == ""


@pytest.fixture
def tell(pipe: Bench) -> Callable[[RolloutEvent], None]:
    def told(event: RolloutEvent) -> None:
        pipe.tally(event)
        pipe.display(event)

    return told


def test_only_the_first_failures_are_spelled_out(pipe: Bench, tell: Callable[[RolloutEvent], None]) -> None:
    with pipe.display:
        tell(CollectionStarted(total=100, already_done=3))
        for row in range(20):
            tell(RolloutFailed(row, 0, "error", f"[reason]\n\x1b[2J\t{row}" if row else "x" * 1000))
    assert pipe.text.splitlines() == [
        "3 of 100 rollouts were finished by an earlier run",
        f"failed: row 0, rollout 0: {'x' * 400} ...",
        "failed: row 1, rollout 0: [reason] [2J 1",
        "failed: row 2, rollout 0: [reason] [2J 2",
        "(more failures go to the failures file alone)",
    ]


def test_lines_come_although_no_event_does() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, os.fdopen(read) as lines:
        display = RolloutDisplay(Console(file=stream, width=100), RunTally(), seconds_between_lines=0.01)
        with display:
            display(CollectionStarted(total=0, already_done=0))
            assert lines.readline().startswith("rollouts 0/0")
            assert lines.readline().startswith("rollouts 0/0")


def test_a_console_that_is_gone_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    stream.close()
    display = RolloutDisplay(Console(file=stream, width=100), RunTally(), seconds_between_lines=0.01)
    with display:
        display(CollectionStarted(total=2, already_done=1))
    assert "the display of progress has stopped" in caplog.text


def test_a_run_whose_console_takes_nothing_goes_on() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as lines:
        with os.fdopen(write, "w") as stream:
            tally = RunTally()
            display = RolloutDisplay(Console(file=stream, width=100), tally, seconds_between_lines=0.001)
            tally(CollectionStarted(total=2, already_done=1))
            display(CollectionStarted(total=2, already_done=1))
            for row in range(10_000):
                tally(RolloutFailed(row, 0, "error", REASON))
                display(RolloutFailed(row, 0, "error", REASON))
            drain = threading.Thread(target=lines.read)
            drain.start()
            with display:
                pass
        drain.join()
