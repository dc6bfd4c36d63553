"""A collector in a process of its own, which is interrupted, killed, or short of disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.fake_agent import WAIT_LIMIT_S, FakeAgent, read_lines, running_fake_agent, write_rows

COLLECT = """
import asyncio, json, pathlib, resource, sys
from omegaconf import OmegaConf
from nemo_gym.rollout_collection import RolloutCollectionConfig, RolloutCollector
from nemo_gym.server_utils import ServerClient, close_client

job, config, largest_file = (json.loads(argument) for argument in sys.argv[1:])
if largest_file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
peaks = []
status = pathlib.Path("/proc/self/status")

def note(event):
    # On Linux ru_maxrss begins with the peak of the process that started this one.
    if status.exists():
        peaks.append(int(status.read_text().partition("VmHWM:")[2].split()[0]))
    else:
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

async def main():
    client = ServerClient.from_config(OmegaConf.create(config))
    try:
        await RolloutCollector(RolloutCollectionConfig(**job), client, on_event=note).run()
    finally:
        await close_client()

asyncio.run(main())
print(json.dumps([peaks[len(peaks) // 4], peaks[-1]]))
"""


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    with running_fake_agent() as agent:
        yield agent


class Collection:
    def __init__(self, folder: Path, agent: FakeAgent) -> None:
        self.agent = agent
        self.input = folder / "rows.jsonl"
        self.output = folder / "out.jsonl"

    def start(self, *, largest_file: int = 0, **options: Any) -> subprocess.Popen[str]:
        job = {"input_path": str(self.input), "output_path": str(self.output), **options}
        config = OmegaConf.to_container(self.agent.config())
        arguments = [json.dumps(argument) for argument in (job, config, largest_file)]
        return subprocess.Popen(
            [sys.executable, "-c", COLLECT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def finish(self, **options: Any) -> str:
        process = self.start(**options)
        output, errors = process.communicate(timeout=2 * WAIT_LIMIT_S)
        assert process.returncode == 0, errors
        return output

    def done(self) -> list[tuple[int, int]]:
        return sorted((line["_ng_task_index"], line["_ng_rollout_index"]) for line in read_lines(self.output))


@pytest.fixture
def collection(tmp_path: Path, agent: FakeAgent) -> Collection:
    return Collection(tmp_path, agent)


def test_killed_at_any_moment_and_resumed_it_makes_every_rollout_once(collection: Collection) -> None:
    write_rows(collection.input, *({"id": number, "filler": "x" * 20_000} for number in range(100)))
    for count in (5, 60, 130):
        process = collection.start(num_repeats=2, concurrency=8, resume=True)
        collection.agent.wait_until(lambda count=count: len(collection.agent.calls) >= count)
        process.kill()
        process.communicate(timeout=WAIT_LIMIT_S)
    collection.finish(num_repeats=2, concurrency=8, resume=True)

    assert collection.done() == [(task, rollout) for task in range(100) for rollout in range(2)]
    assert len(collection.agent.calls) <= 200 + 3 * 8


def test_killed_within_a_line_it_makes_that_rollout_again(collection: Collection) -> None:
    write_rows(collection.input, *({"id": number} for number in range(10)))
    collection.finish()
    whole = collection.output.read_bytes()
    collection.output.write_bytes(whole[: len(whole) - 40])
    collection.finish(resume=True)

    assert collection.done() == [(task, 0) for task in range(10)]


def test_ctrl_c_ends_it_promptly_and_keeps_what_is_finished(collection: Collection) -> None:
    write_rows(collection.input, *({"id": number} for number in range(5)), *({"behaviours": ["hold"]} for _ in "ab"))
    process = collection.start(concurrency=2)
    collection.agent.wait_until(lambda: len(collection.agent.calls) == 7)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_LIMIT_S)  # what is held is not answered

    assert process.returncode != 0
    assert collection.done() == [(task, 0) for task in range(5)]


def test_a_second_collector_of_the_same_output_is_refused(collection: Collection) -> None:
    write_rows(collection.input, {"behaviours": ["hold"]})
    first = collection.start()
    collection.agent.wait_until(lambda: collection.agent.in_flight == 1)
    second = collection.start(resume=True)
    _, errors = second.communicate(timeout=WAIT_LIMIT_S)
    assert second.returncode != 0
    assert "being written by another process" in errors

    collection.agent.release()
    first.communicate(timeout=WAIT_LIMIT_S)
    assert first.returncode == 0
    assert collection.done() == [(0, 0)]


def test_without_room_for_a_result_it_stops_and_leaves_whole_lines(collection: Collection) -> None:
    write_rows(collection.input, *({"id": number, "filler": "x" * 3_000} for number in range(10)))
    process = collection.start(largest_file=12_000, concurrency=1)
    _, errors = process.communicate(timeout=WAIT_LIMIT_S)

    assert process.returncode != 0
    assert "RolloutsStoppedError: can't write" in errors
    assert "File too large" in errors
    assert collection.done() == [(0, 0), (1, 0), (2, 0)]
    collection.finish(resume=True)
    assert len(collection.done()) == 10


def test_its_memory_does_not_grow_with_the_length_of_the_run(collection: Collection) -> None:
    write_rows(collection.input, *({"id": number, "filler": "x" * 30_000} for number in range(500)))
    quarter, end = json.loads(collection.finish(num_repeats=4, concurrency=256))

    assert len(collection.done()) == 2_000
    assert end < 200_000, "more than 200 MB"
    assert end - quarter < 15_000, "more than 15 MB in the last three quarters"
