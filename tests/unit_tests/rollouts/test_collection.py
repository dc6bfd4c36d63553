"""A collector at work against a real agent server."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym import rollout_collection
from nemo_gym.errors import DatasetError, UsageError
from nemo_gym.rollout_collection import (
    NG_FAILURE_CLASS_KEY,
    NG_NO_PERSIST_KEY,
    NG_TERMINAL_KEY,
    RolloutCollectionConfig,
    RolloutCollectionHelper,
    RolloutCollector,
    RolloutsStoppedError,
    is_terminal_failure,
)
from nemo_gym.rollouts.aggregation import fetch_agent_metrics
from nemo_gym.rollouts.events import (
    CollectionStarted,
    RolloutEvent,
    RolloutFailed,
    RolloutFinished,
    RolloutRunAgain,
    RolloutStarted,
)
from nemo_gym.rollouts.progress_record import RunProgress, read_runs
from nemo_gym.server_utils import ServerClient, close_client
from tests.fake_agent import WAIT_LIMIT_S, FakeAgent, read_lines, running_fake_agent, write_rows


@pytest.fixture(scope="module")
def agent_server() -> Iterator[FakeAgent]:
    with running_fake_agent() as agent:
        yield agent


@pytest.fixture
async def agent(agent_server: FakeAgent) -> AsyncIterator[FakeAgent]:
    yield agent_server
    await agent_server.forget()


@pytest.fixture(autouse=True)
async def closed_client() -> AsyncIterator[None]:
    yield
    await close_client()


class Bench:
    """One input, one output, and collectors between them."""

    def __init__(self, folder: Path, agent: FakeAgent) -> None:
        self.input = folder / "rows.jsonl"
        self.output = folder / "out.jsonl"
        self.failures = folder / "out_failures.jsonl"
        self.record = folder / "out_run.json"
        self.agent = agent
        self.config = agent.config()
        self.events: list[RolloutEvent] = []
        self.lines_when_told: list[int] = []
        self._told = asyncio.Event()

    def collector(self, **options: Any) -> RolloutCollector:
        job = RolloutCollectionConfig(input_path=self.input, output_path=self.output, **options)
        return RolloutCollector(job, ServerClient.from_config(self.config), on_event=self.note)

    def note(self, event: RolloutEvent) -> None:
        self.events.append(event)
        if isinstance(event, RolloutFinished):
            self.lines_when_told.append(len(read_lines(self.output)))
            self._told.set()

    async def until_finished(self, count: int) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while len(self.lines_when_told) < count:
                self._told.clear()
                await self._told.wait()

    def done(self) -> list[tuple[int, int]]:
        return [(line["_ng_task_index"], line["_ng_rollout_index"]) for line in read_lines(self.output)]

    def kinds(self) -> Counter[str]:
        return Counter(line[NG_FAILURE_CLASS_KEY] for line in read_lines(self.failures))


@pytest.fixture
def bench(tmp_path: Path, agent: FakeAgent) -> Bench:
    bench = Bench(tmp_path, agent)
    write_rows(bench.input, *({"id": number} for number in range(4)))
    return bench


async def test_every_row_is_posted_as_often_as_asked_and_each_reply_is_one_line(bench: Bench) -> None:
    summary = await bench.collector(num_repeats=3).run()

    assert summary.complete
    assert (summary.total, summary.finished, summary.failed) == (12, 12, 0)
    assert sorted(bench.done()) == [(task, rollout) for task in range(4) for rollout in range(3)]
    for line in read_lines(bench.output):
        assert line["id"] == line["_ng_task_index"]
        assert line["reward"] == 1.0
        assert line["_ng_attempt_index"] == 0
        assert line["_ng_duration_s"] > 0
        assert line["agent_ref"] == {"type": "responses_api_agents", "name": "agent"}
    assert not bench.failures.exists()


async def test_blank_lines_are_skipped_and_limit_counts_rows(bench: Bench) -> None:
    bench.input.write_text('\n{"id": "a"}\n\n   \n{"id": "b"}\n{"id": "c"}')

    await bench.collector(limit=2).run()

    assert {line["_ng_task_index"]: line["id"] for line in read_lines(bench.output)} == {0: "a", 1: "b"}


async def test_no_more_rollouts_are_under_way_than_allowed(bench: Bench) -> None:
    write_rows(bench.input, *({"behaviours": ["hold"]} for _ in range(20)))
    run = asyncio.create_task(bench.collector(concurrency=5).run())
    await bench.agent.until(lambda: bench.agent.in_flight == 5)
    bench.agent.release()

    assert (await run).finished == 20
    assert bench.agent.most_in_flight == 5


async def test_a_result_is_in_the_file_before_the_run_ends_and_before_it_is_told(bench: Bench) -> None:
    write_rows(bench.input, {"id": 0}, {"behaviours": ["hold"]})
    run = asyncio.create_task(bench.collector().run())
    await bench.until_finished(1)

    assert not run.done()
    bench.agent.release()
    await run
    assert bench.lines_when_told == [1, 2]


async def test_events_tell_every_step(bench: Bench) -> None:
    write_rows(bench.input, {"behaviours": [503, "ok"]}, {"behaviours": [400]})
    await bench.collector(concurrency=1).run()

    kinds = [type(event) for event in bench.events]
    assert kinds == [
        CollectionStarted,
        RolloutStarted,
        RolloutRunAgain,
        RolloutFinished,
        RolloutStarted,
        RolloutFailed,
    ]
    assert bench.events[0] == CollectionStarted(total=2, already_done=0)
    again = bench.events[2]
    assert isinstance(again, RolloutRunAgain)
    assert (again.attempt_index, again.failure_class) == (1, "http_error")
    finished = bench.events[3]
    assert isinstance(finished, RolloutFinished)
    assert finished.reward == 1.0


@pytest.mark.promise("lost-is-run-again")
async def test_a_lost_session_is_run_again_from_its_row(bench: Bench) -> None:
    write_rows(bench.input, {"id": 7, "behaviours": [410, 410, "ok"]})
    summary = await bench.collector().run()

    assert (summary.finished, summary.failed, summary.run_again, summary.lost_sessions) == (1, 0, 2, 2)
    assert [(call["id"], call["_ng_attempt_index"]) for call in bench.agent.calls] == [(7, 0), (7, 1), (7, 2)]
    assert read_lines(bench.output)[0]["_ng_attempt_index"] == 2


async def test_a_session_lost_too_often_is_a_failure(bench: Bench) -> None:
    write_rows(bench.input, {"behaviours": [410]})
    summary = await bench.collector(max_session_attempts=2).run()

    assert (summary.finished, summary.failed) == (0, 1)
    [failure] = read_lines(bench.failures)
    assert failure[NG_FAILURE_CLASS_KEY] == "session_lost"
    assert (failure["status"], failure["attempts"]) == (410, 2)
    assert "said 410" in failure["reason"]


@pytest.mark.parametrize("trouble", [429, 502, 503, 504, "broken"])
async def test_passing_trouble_is_tried_again(bench: Bench, trouble: int | str) -> None:
    write_rows(bench.input, {"behaviours": [trouble, "ok"]})
    summary = await bench.collector().run()

    assert (summary.finished, summary.run_again) == (1, 1)


async def test_trouble_that_does_not_pass_is_a_failure_after_the_last_attempt(bench: Bench) -> None:
    write_rows(bench.input, {"behaviours": [503]}, {"behaviours": ["broken"]})
    summary = await bench.collector(max_attempts=2).run()

    assert summary.failed == 2
    assert bench.kinds() == {"http_error": 1, "connection_lost": 1}
    assert [line["attempts"] for line in read_lines(bench.failures)] == [2, 2]


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_an_error_of_the_rollout_itself_is_not_tried_again(bench: Bench, status: int) -> None:
    write_rows(bench.input, {"id": "x", "behaviours": [status, "ok"]})
    summary = await bench.collector().run()

    assert summary.failed == 1
    assert not summary.complete
    [failure] = read_lines(bench.failures)
    assert (failure["status"], failure["attempts"]) == (status, 1)
    assert failure["row"]["id"] == "x"
    assert f"said {status}" in failure["reason"]
    assert read_lines(bench.output) == []


@pytest.mark.parametrize("reply", [{}, {"reward": None}, {"reward": "1"}, {"reward": True}, ["reward"], "text"])
async def test_a_reply_without_a_finite_reward_is_a_failure_and_not_a_zero(bench: Bench, reply: Any) -> None:
    write_rows(bench.input, {"behaviours": [reply]})
    summary = await bench.collector().run()

    assert summary.failed == 1
    assert bench.kinds() == {"bad_reply": 1}
    assert read_lines(bench.output) == []


async def test_a_failure_that_the_reply_reports_is_tried_again_unless_it_is_terminal(bench: Bench) -> None:
    failed = {"reward": 0.0, NG_FAILURE_CLASS_KEY: "sandbox_died"}
    terminal = {**failed, NG_TERMINAL_KEY: True}
    write_rows(
        bench.input,
        {"behaviours": [failed, "ok"]},
        {"behaviours": [terminal, "ok"]},
        {"behaviours": [{"reward": 1.0, NG_NO_PERSIST_KEY: True}, "ok"]},
    )
    summary = await bench.collector().run()

    assert bench.done() == [(0, 0)]
    assert (summary.finished, summary.failed, summary.run_again) == (1, 2, 1)
    assert bench.kinds() == {"sandbox_died": 1, "not_persisted": 1}
    assert is_terminal_failure(terminal)
    assert not is_terminal_failure(failed)


async def test_a_rollout_that_takes_too_long_is_a_failure(bench: Bench) -> None:
    write_rows(bench.input, {"behaviours": ["hold"]}, {"id": 1})
    summary = await bench.collector(rollout_timeout_s=0.3).run()

    assert (summary.finished, summary.failed) == (1, 1)
    assert bench.kinds() == {"timeout": 1}


async def test_a_bad_line_is_reported_and_the_run_goes_on(bench: Bench) -> None:
    bench.input.write_bytes(b'{"id": 0}\n{"id": \n[1]\n"\xff"\n\n{"id": 4}\n')
    summary = await bench.collector(num_repeats=2).run()

    assert sorted(bench.done()) == [(0, 0), (0, 1), (4, 0), (4, 1)]
    assert summary.failed == 6
    assert {line["line"] for line in read_lines(bench.failures)} == {2, 3, 4}
    assert bench.kinds() == {"bad_row": 6}
    assert any("found an array" in line["reason"] for line in read_lines(bench.failures))


async def test_a_corrected_bad_line_is_made_on_resume(bench: Bench) -> None:
    bench.input.write_text('{"id": 0}\n{"id": \n{"id": 2}\n')
    await bench.collector().run()
    bench.input.write_text('{"id": 0}\n{"id": 1}\n{"id": 2}\n')
    summary = await bench.collector(resume=True).run()

    assert (summary.already_done, summary.finished) == (2, 1)
    assert sorted(bench.done()) == [(0, 0), (1, 0), (2, 0)]
    assert not bench.failures.exists()


async def test_the_agent_is_the_one_asked_for_else_the_rows_own(bench: Bench) -> None:
    bench.config = bench.agent.config("first", "second")
    write_rows(bench.input, {"agent_ref": {"type": "responses_api_agents", "name": "second"}}, {"id": 1})
    await bench.collector().run()
    assert [line["agent_ref"]["name"] for line in read_lines(bench.output)] == ["second"]
    [failure] = read_lines(bench.failures)
    assert failure[NG_FAILURE_CLASS_KEY] == "no_agent"
    assert "first, second" in failure["reason"]

    await bench.collector(agent="first", overwrite=True).run()
    assert [line["agent_ref"]["name"] for line in read_lines(bench.output)] == ["first", "first"]


async def test_an_unknown_agent_is_refused_with_the_nearest_name(bench: Bench) -> None:
    with pytest.raises(UsageError, match="Did you mean 'agent'"):
        await bench.collector(agent="agnet").run()


async def test_parameters_asked_for_are_put_over_the_rows_own(bench: Bench) -> None:
    write_rows(bench.input, {"responses_create_params": {"input": "hi", "temperature": 0}})
    await bench.collector(responses_create_params={"temperature": 1}).run()

    assert bench.agent.calls[0]["responses_create_params"] == {"input": "hi", "temperature": 1}


async def test_an_input_without_rows_is_refused(bench: Bench) -> None:
    bench.input.write_text("\n\n")
    with pytest.raises(DatasetError, match="no rows"):
        await bench.collector().run()
    bench.input.unlink()
    with pytest.raises(DatasetError, match="can't read"):
        await bench.collector().run()
    assert not bench.output.exists()


async def test_an_input_that_the_run_would_write_is_refused(bench: Bench) -> None:
    write_rows(bench.failures, {"id": 1})
    bench.input = bench.failures
    with pytest.raises(UsageError, match="is the input"):
        await bench.collector(overwrite=True).run()
    assert read_lines(bench.failures) == [{"id": 1}]


async def test_cancellation_ends_the_run_promptly_and_keeps_what_is_finished(bench: Bench) -> None:
    write_rows(bench.input, {"id": 0}, {"id": 1}, {"behaviours": ["hold"]}, {"behaviours": ["hold"]})
    run = asyncio.create_task(bench.collector().run())
    await bench.agent.until(lambda: len(bench.agent.calls) == 4)
    await bench.until_finished(2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(run, WAIT_LIMIT_S)

    assert sorted(bench.done()) == [(0, 0), (1, 0)]
    assert not bench.failures.exists()
    bench.agent.release()
    assert (await bench.collector(resume=True).run()).finished == 2
    assert sorted(bench.done()) == [(0, 0), (1, 0), (2, 0), (3, 0)]


async def test_stop_ends_the_run_with_its_reason(bench: Bench) -> None:
    write_rows(bench.input, {"id": 0}, {"behaviours": ["hold"]})
    collector = bench.collector()
    run = asyncio.create_task(collector.run())
    await bench.agent.until(lambda: len(bench.agent.calls) == 2)
    await bench.until_finished(1)
    collector.stop("the server x has exited")
    with pytest.raises(RolloutsStoppedError, match="x has exited") as stopped:
        await asyncio.wait_for(run, WAIT_LIMIT_S)

    assert stopped.value.summary.finished == 1
    assert stopped.value.exit_code == 1
    assert bench.done() == [(0, 0)]


async def test_an_agent_that_is_gone_stops_the_run_and_is_no_failure_of_rollouts(bench: Bench) -> None:
    with running_fake_agent() as gone:
        bench.config = gone.config()
    with pytest.raises(RolloutsStoppedError, match="can't connect to agent 'agent'"):
        await bench.collector(connect_patience_s=0.2).run()

    assert not bench.failures.exists()


async def test_the_helper_reads_the_configuration_of_the_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_collection, "get_global_config_dict", lambda: bench.config)
    job = RolloutCollectionConfig.model_validate(
        {
            "input_jsonl_fpath": str(bench.input),
            "output_jsonl_fpath": str(bench.output),
            "agent_name": "agent",
            "num_samples_in_parallel": 2,
        }
    )
    assert (await RolloutCollectionHelper().run_from_config(job)).finished == 4


async def test_each_agent_sums_up_its_own_results_without_their_bodies(bench: Bench) -> None:
    bench.config = bench.agent.config("first", "second")
    rows = [{"agent_ref": {"name": name}, "reward": reward} for name, reward in [("first", 1), ("second", 0.5)]]
    write_rows(bench.input, *({**row, "responses_create_params": {"input": "x"}} for row in rows))
    await bench.collector().run()
    metrics = await fetch_agent_metrics(ServerClient.from_config(bench.config), bench.output)

    assert {name: one.agent_metrics["mean/reward"] for name, one in metrics.items()} == {"first": 1, "second": 0.5}
    assert metrics["first"].agent_metrics["mean/output_tokens"] == 5
    for result in bench.agent.aggregated:
        assert "responses_create_params" not in result
        assert result["response"].keys() == {"usage"}


async def test_an_agent_that_cannot_sum_up_is_left_out_with_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.collector().run()
    lines = [{**line, "agent_ref": {"name": "stranger"}} for line in read_lines(bench.output)]
    bench.output.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))

    assert await fetch_agent_metrics(ServerClient.from_config(bench.config), bench.output) == {}
    assert "stranger" in caplog.text


async def test_resume_and_overwrite_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        RolloutCollectionConfig(input_path=tmp_path, output_path=tmp_path, resume=True, overwrite=True)


async def test_a_row_or_reply_too_deeply_nested_to_be_written_is_a_failure_and_the_run_goes_on(bench: Bench) -> None:
    deep = 600
    bench.input.write_text(
        '{"id": 0}\n'
        f'{{"deep": {"[" * deep}{"]" * deep}}}\n'
        f'{{"behaviours": ["text:{{\\"reward\\": 1, \\"deep\\": {"[" * deep}{"]" * deep}}}"]}}\n'
    )
    summary = await bench.collector().run()

    assert bench.done() == [(0, 0)]
    assert summary.failed == 2
    assert bench.kinds() == {"bad_row": 1, "bad_reply": 1}


async def test_the_reason_quotes_a_reward_of_any_text(bench: Bench) -> None:
    write_rows(bench.input, {"behaviours": [{"reward": "é" * 100}]}, {"id": 1})
    await bench.collector().run()

    assert bench.kinds() == {"bad_reply": 1}
    assert "éé" in read_lines(bench.failures)[0]["reason"]


@pytest.mark.parametrize("becomes", ['{"id": 0}\n{"id": 9}\n', '{"id": 0}\n'])
async def test_an_input_that_changes_while_it_is_read_stops_the_run(bench: Bench, becomes: str) -> None:
    bench.input.write_text('{"id": 0}\n{"id": 1}\n')
    async with bench.collector(concurrency=1) as collector:
        bench.input.write_text(becomes)
        with pytest.raises(RolloutsStoppedError, match="has changed"):
            await collector.collect()

    assert bench.done() == [(0, 0)]


async def test_rows_that_are_added_while_it_is_read_are_left_to_the_next_run(bench: Bench) -> None:
    async with bench.collector() as collector:
        with bench.input.open("a") as file:
            file.write('{"id": "new"}\n')
        await collector.collect()
    assert len(bench.done()) == 4

    assert (await bench.collector(resume=True).run()).finished == 1


async def test_what_can_not_be_run_is_refused_on_entering_and_leaves_no_file(bench: Bench) -> None:
    bench.input.write_text("")
    with pytest.raises(DatasetError, match="no rows"):
        async with bench.collector():
            pass
    write_rows(bench.input, {"id": 0})
    async with bench.collector():
        with pytest.raises(UsageError, match="another process"):
            async with bench.collector():
                pass
    assert not bench.output.exists()
    assert not bench.record.exists()


async def test_entering_removes_nothing_of_what_is_to_be_overwritten(bench: Bench) -> None:
    await bench.collector().run()
    async with bench.collector(overwrite=True, limit=1) as collector:
        assert len(bench.done()) == 4
        await collector.collect()
    assert len(bench.done()) == 1


async def test_an_output_that_is_no_regular_file_is_refused(bench: Bench, tmp_path: Path) -> None:
    bench.output = tmp_path / "pipe"
    os.mkfifo(bench.output)
    with pytest.raises(UsageError, match="not a regular file"):
        await bench.collector(overwrite=True).run()


async def test_an_input_that_is_the_output_by_another_name_is_refused(bench: Bench) -> None:
    bench.output.hardlink_to(bench.input)
    with pytest.raises(UsageError, match="is the input"):
        await bench.collector(overwrite=True).run()
    assert len(read_lines(bench.input)) == 4


async def test_more_rollouts_than_can_be_kept_account_of_are_refused(bench: Bench) -> None:
    with pytest.raises(UsageError, match="rollouts"):
        await bench.collector(num_repeats=10**15).run()


async def test_each_attempt_names_its_rollout_to_the_agent(bench: Bench) -> None:
    write_rows(bench.input, {"id": 0, "behaviours": [503, "ok"]}, {"id": 1})
    await bench.collector(num_repeats=2).run()
    assert Counter(bench.agent.rollout_ids) == {"0-0": 2, "0-1": 2, "1-0": 1, "1-1": 1}


async def test_where_the_time_went_is_kept_as_far_as_the_agent_tells(bench: Bench) -> None:
    parts = {"model": 1.5, "tools": 0.5, "seed": 0.1, "verify": 0.2}
    told = [
        {"reward": 1.0, "_ng_rollout_seconds": said}
        for said in (parts, "long", {"total": -1, "model": 2, "x": "1", "y": True})
    ]
    of_an_earlier_run = {"id": 3, "_ng_rollout_seconds": {"model": 9}}
    write_rows(bench.input, *({"behaviours": [reply]} for reply in told), of_an_earlier_run)
    await bench.collector().run()
    lines = {line["_ng_task_index"]: line for line in read_lines(bench.output)}
    seconds = [lines[task]["_ng_rollout_seconds"] for task in range(4)]
    by_part = [{part: told for part, told in one.items() if part != "total"} for one in seconds]
    assert by_part == [parts, {}, {"model": 2}, {}]
    assert all(lines[task]["_ng_duration_s"] == seconds[task]["total"] > 0 for task in range(4))


async def test_what_a_row_says_of_its_outcome_is_not_taken_for_the_agents_word(bench: Bench) -> None:
    of_earlier_runs = ({NG_FAILURE_CLASS_KEY: "timeout", NG_TERMINAL_KEY: True}, {NG_NO_PERSIST_KEY: True})
    write_rows(bench.input, *of_earlier_runs)
    assert (await bench.collector().run()).finished == 2
    assert not any(key in line for line in read_lines(bench.output) for row in of_earlier_runs for key in row)


def first_run_seen() -> RunProgress:
    """Wait until a run has a record."""
    deadline = time.monotonic() + 20
    while not (runs := read_runs()):
        assert time.monotonic() < deadline, "no run has a record"
        time.sleep(0.01)
    return runs[0]


async def test_the_run_is_seen_from_elsewhere_while_it_goes_on(bench: Bench) -> None:
    write_rows(bench.input, {"id": 0}, {"behaviours": ["hold"]})
    run = asyncio.create_task(bench.collector(concurrency=2).run())
    seen = await asyncio.to_thread(first_run_seen)
    assert (seen.total, seen.already_done, seen.finished) == (2, 0, None)
    assert (seen.agent, seen.output, seen.head_url) == ("agent", str(bench.output), "http://127.0.0.1:1")
    bench.agent.release()
    await run
    assert [(one.done, one.finished) for one in read_runs()] == [(2, "completed")]


def has_been_asked(agent: FakeAgent, times: int) -> bool:
    return len(agent.calls) == times


async def test_a_record_tells_how_a_run_ended_that_did_not_come_to_its_end(bench: Bench) -> None:
    write_rows(bench.input, {"behaviours": ["hold"]})
    for number in range(2):
        collector = bench.collector()
        run = asyncio.create_task(collector.run())
        await bench.agent.until(partial(has_been_asked, bench.agent, number + 1))
        if number:
            collector.stop("the server x has exited")
        else:
            run.cancel()
        await asyncio.wait([run])
    assert Counter(one.finished for one in read_runs()) == {"interrupted": 1, "failed": 1}


async def test_a_state_directory_that_can_not_be_written_fails_no_run(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NEMO_GYM_STATE_DIR", str(bench.input))
    assert (await bench.collector().run()).complete
    assert caplog.text.count("the run's progress can't be shown elsewhere") == 1
