"""What single benchmarks make of their measurements."""

from __future__ import annotations

from benchmarks.harness.results import Table
from benchmarks.harness.rounds import CPU
from benchmarks.suite import counter
from benchmarks.suite.counter import VERSUS_BARE, VERSUS_CEILING, VERSUS_HAPROXY

COST = {
    counter.BARE_1: 4.0,
    counter.OURS_4: 6.0,
    counter.UNROUTED_4: 3.0,
    counter.HAPROXY: 5.0,
    counter.STRAIGHT: 9.0,
    counter.CLIENT_UNROUTED: 8.0,
    counter.CLIENT_HAPROXY: 10.0,
}


def counted() -> Table:
    table = Table("Counting", (CPU, VERSUS_BARE, VERSUS_CEILING, VERSUS_HAPROXY))
    for name, cost in COST.items():
        table.add(name, {CPU.key: cost})
    counter.compare(table)
    return table


def test_what_a_client_calls_is_compared_with_what_the_same_client_calls() -> None:
    table = counted()
    keys = (VERSUS_BARE.key, VERSUS_CEILING.key, VERSUS_HAPROXY.key)
    assert [table.values(counter.OURS_4, key) for key in keys] == [[1.5], [2.0], [1.2]]
    assert [table.values(counter.STRAIGHT, key) for key in keys] == [[], [1.125], [0.9]]


def test_the_table_and_the_targets_of_the_counter_say_the_same() -> None:
    table = counted()
    limits = {(check.target, check.what): check.value.median for check in counter.checks_of(table) if check.value}
    for name, what in [(counter.OURS_4, "foreign client, 4 workers"), (counter.STRAIGHT, "ServerClient, 4 workers")]:
        target = 2 if name == counter.OURS_4 else 3
        assert limits[target, f"CPU per request: {what} / no routing"] == table.values(name, VERSUS_CEILING.key)[0]
        assert limits[target, f"CPU per request: {what} / HAProxy"] == table.values(name, VERSUS_HAPROXY.key)[0]
