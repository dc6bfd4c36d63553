"""Interleaved rounds: in which order alternatives are measured, and what is made of one that fails."""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.harness.load import LoadError
from benchmarks.harness.results import Column, Table
from benchmarks.harness.rounds import interleave
from benchmarks.harness.run import Run


def run_of(rounds: int, output: io.StringIO | None = None) -> Run:
    return Run(Path("/nowhere"), rounds, True, Console(file=output or io.StringIO(), width=200))


def recording(order: list[str], name: str) -> Callable[[int], Awaitable[dict[str, float]]]:
    async def measure(number: int) -> dict[str, float]:
        order.append(name)
        return {"value": float(number)}

    return measure


async def measured(names: str, rounds: int) -> list[str]:
    order: list[str] = []
    measures = {name: recording(order, name) for name in names}
    await interleave(run_of(rounds), Table("T", (Column("value", "value"),)), measures)
    return ["".join(order[start : start + len(names)]) for start in range(0, len(order), len(names))]


async def test_of_two_alternatives_each_comes_first_as_often_as_the_other() -> None:
    assert await measured("ab", 4) == ["ab", "ba", "ba", "ab"]


async def test_every_second_round_runs_backwards_and_each_pair_of_rounds_begins_elsewhere() -> None:
    assert await measured("abcd", 5) == ["abcd", "dcba", "bcda", "adcb", "cdab"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "broken: failed in round 2: TimeoutError"),
        (LoadError("the server closed\na connection"), "broken: failed in round 2: the server closed"),
    ],
)
async def test_an_alternative_that_fails_is_noted_and_the_others_go_on(error: Exception, said: str) -> None:
    async def broken(number: int) -> dict[str, float]:
        if number:
            raise error
        return {"value": 1.0}

    run = run_of(3)
    table = Table("T", (Column("value", "value"),))
    await interleave(run, table, {"broken": broken, "sound": recording([], "sound")})
    assert run.notices == [said]
    assert (table.values("broken", "value"), table.values("sound", "value")) == ([1.0], [0.0, 1.0, 2.0])


def test_a_notice_is_shown_as_a_program_has_said_it() -> None:
    output = io.StringIO()
    said = "HAProxy: Binding [/tmp/h.cfg:10] for [front]: in use"
    run_of(1, output).notice(said)
    assert said in output.getvalue()
