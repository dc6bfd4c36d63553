"""Repeated troubles are counted, and nothing different is hidden behind them."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from nemo_gym.logs import rollout_id
from nemo_gym.logs.repeats import FIRST_WINDOW_S, LONGEST_WINDOW_S, TEXTS_PER_WINDOW, WRITTEN_AT_FIRST, RepeatCounter
from tests.unit_tests.logs.log_writing import Written


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def counting() -> tuple[Written, RepeatCounter, Clock]:
    clock = Clock()
    counter = RepeatCounter(clock=clock)
    return Written(repeats=counter), counter, clock


def fail(text: str) -> None:
    raise ValueError(text)


def fail_elsewhere(text: str) -> None:
    raise ValueError(text)


def log_failure(written: Written, text: str, how: Callable[[str], None] = fail) -> None:
    try:
        how(text)
    except ValueError:
        written.logger.exception("POST /verify failed")


def test_a_trouble_two_thousand_times_is_a_few_lines() -> None:
    written, _, _ = counting()
    for number in range(2_000):
        written.logger.error("worker %s is gone, port %d", f"{number:032x}", 30_000 + number)
    assert len(written.lines) == WRITTEN_AT_FIRST
    written.handler.close()
    assert len(written.lines) == WRITTEN_AT_FIRST + 1
    assert "1,997 more like this in 1 s; the last one: worker 000000000000000000000000000007cf" in written.lines[-1]


def test_each_window_has_one_line_while_it_goes_on() -> None:
    written, _, clock = counting()
    for _ in range(10):
        written.logger.error("gone")
    clock.now += FIRST_WINDOW_S
    for _ in range(5):
        written.logger.error("gone")
    assert [line.partition("test: ")[2] for line in written.lines] == [
        "gone", "gone", "gone", "7 more like this in 10 s; the last one: gone"]  # fmt: skip
    clock.now += 2 * FIRST_WINDOW_S
    written.logger.error("gone")
    assert "5 more like this in 20 s" in written.lines[-1]


def test_it_is_news_again_when_it_has_been_quiet() -> None:
    written, counter, clock = counting()
    for _ in range(10):
        written.logger.error("gone")
    clock.now += FIRST_WINDOW_S
    assert [found.count for found in counter.due()] == [7]
    clock.now += 2 * FIRST_WINDOW_S
    assert counter.due() == []
    before = len(written.lines)
    written.logger.error("gone")
    assert len(written.lines) == before + 1
    assert written.lines[-1].endswith(": gone")


def test_windows_grow_to_a_limit() -> None:
    written, counter, clock = counting()
    seconds = []
    for _ in range(10):
        for _ in range(WRITTEN_AT_FIRST + 1):
            written.logger.error("gone")
        wait = counter.next_due_in()
        assert wait is not None
        clock.now += wait
        seconds += [found.seconds for found in counter.due()]
    assert seconds[:3] == [FIRST_WINDOW_S, 2 * FIRST_WINDOW_S, 4 * FIRST_WINDOW_S]
    assert seconds[-1] == LONGEST_WINDOW_S


def test_different_troubles_of_one_place_are_all_written() -> None:
    written, _, _ = counting()
    for _ in range(1_000):
        written.logger.error("%s answered %d", "model", 503)
    written.logger.error("%s answered %d", "model", 401)
    written.logger.error("%s answered %d", "tools", 503)
    assert [line.partition("test: ")[2] for line in written.lines[-2:]] == ["model answered 401", "tools answered 503"]


def test_exceptions_are_told_apart_by_type_text_and_place() -> None:
    written, _, _ = counting()
    for _ in range(100):
        log_failure(written, "no spoon")
    log_failure(written, "no fork")
    log_failure(written, "no spoon", fail_elsewhere)
    first = [line for line in written.lines if " ERROR " in line]
    assert len(first) == WRITTEN_AT_FIRST + 2
    assert "ValueError: no fork" in first[-2]
    assert "ValueError: no spoon" in first[-1]


def test_a_flood_of_different_texts_is_bounded_and_says_so() -> None:
    written, _, _ = counting()
    for number in range(500):
        written.logger.error("no tool %s", "".join(chr(ord("g") + int(digit)) for digit in f"{number:04d}"))
    assert len(written.lines) == TEXTS_PER_WINDOW
    written.handler.close()
    assert f"{500 - TEXTS_PER_WINDOW} more like this" in written.lines[-1]
    assert f"with {500 - TEXTS_PER_WINDOW} other texts" in written.lines[-1]


def test_news_are_never_counted() -> None:
    written, _, _ = counting()
    for _ in range(100):
        written.logger.info("the client went away")
    assert len(written.lines) == 100


def test_memory_is_bounded_and_what_is_forgotten_is_told() -> None:
    written, counter, _ = counting()
    for _ in range(10):
        written.logger.error("the first")
    for number in range(600):
        kind = "".join(chr(ord("g") + int(digit)) for digit in f"{number:03d}")
        written.logger.error(f"kind {kind}")  # noqa: G004
    assert len(counter) <= 256
    assert len(written.lines) == WRITTEN_AT_FIRST + 1 + 600
    assert [line for line in written.lines if "7 more like this" in line]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.sampled_from([0.0, 1.0, 11.0, 400.0]))))
def test_every_record_is_written_or_counted(records: list[tuple[str, str, float]]) -> None:
    written, _, clock = counting()
    for kind, text, wait in records:
        clock.now += wait
        written.logger.warning(f"{kind} %s", text)  # noqa: G004
    written.handler.close()
    counts = [re.search(r"(\d+) more like this", line) for line in written.lines]
    told = sum(int(found[1]) for found in counts if found)
    assert told + sum(found is None for found in counts) == len(records)
    for kind, text, _ in records:
        assert any(line.endswith(f": {kind} {text}") for line in written.lines)


def test_what_was_counted_is_told_in_time_although_nothing_else_is_logged() -> None:
    written = Written(repeats=RepeatCounter(first_window_s=0.01))
    told = threading.Event()
    rollout_id.set("17-3")
    append = written.texts.append

    def write(text: str) -> None:
        append(text)
        if "more like this" in text:
            told.set()

    written.handler._write = write
    for _ in range(WRITTEN_AT_FIRST + 2):
        written.logger.error("gone")
    assert told.wait(60)
    assert "rollout=" in written.lines[0]
    assert "rollout=" not in written.lines[-1]
    written.handler.close()


def test_a_log_that_can_not_be_written_breaks_nothing() -> None:
    def full(text: str) -> None:
        raise OSError(28, "No space left on device")

    written = Written(repeats=RepeatCounter())
    written.handler._write = full
    for _ in range(10):
        written.logger.error("gone")
    written.handler.close()
    assert logging.getLevelName(logging.ERROR) == "ERROR"


def test_a_text_that_is_not_written_counts_once_among_the_others() -> None:
    written, _, _ = counting()
    for name in "ghijklmnopqrstuvwxyz":
        written.logger.error("no tool %s", name)
    for _ in range(50):
        written.logger.error("no tool %s", "gh")
        written.logger.error("no tool %s", "hg")
    written.handler.close()
    assert "100 more like this in 1 s, with 2 other texts; the last one: no tool hg" in written.lines[-1]


def test_long_texts_that_differ_at_their_end_are_all_written() -> None:
    written, _, _ = counting()
    for _ in range(100):
        written.logger.error("%s", "x" * 5_000 + "gone")
    written.logger.error("%s", "x" * 5_000 + "refused")
    assert written.lines[-1].endswith("refused")


def test_a_forked_process_leaves_what_was_counted_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    written, _, _ = counting()
    for _ in range(10):
        written.logger.error("gone")
    before = len(written.lines)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    written.handler.close()
    written.logger.error("gone")
    assert [line.partition("test: ")[2] for line in written.lines[before:]] == ["gone"]


def test_a_trouble_with_a_short_window_does_not_wait_for_one_with_a_long_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    class Timer(threading.Timer):
        def __init__(self, interval: float, *args: Any) -> None:
            waits.append(interval)
            super().__init__(3600, *args)

    monkeypatch.setattr(threading, "Timer", Timer)
    written, counter, clock = counting()
    for _ in range(10):
        for _ in range(WRITTEN_AT_FIRST + 1):
            written.logger.error("often")
        clock.now += counter.next_due_in() or 0
        counter.due()
    written.handler.close()
    waits.clear()
    for _ in range(WRITTEN_AT_FIRST + 1):
        written.logger.error("often")
    assert waits
    assert max(waits) <= FIRST_WINDOW_S
    written.handler.close()
