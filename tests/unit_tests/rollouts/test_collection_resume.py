"""Collections that are continued, refused or replaced; what stands in the files afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from nemo_gym.errors import DatasetError, NemoGymError, UsageError
from nemo_gym.rollout_collection import CollectionSummary, RolloutCollectionConfig, RolloutCollector
from nemo_gym.rollouts.io import ResultsFile
from nemo_gym.server_utils import ServerClient, close_client
from tests.fake_agent import FakeAgent, read_lines, running_fake_agent, write_rows


@pytest.fixture(scope="module")
def agent_server() -> Iterator[FakeAgent]:
    with running_fake_agent() as agent:
        yield agent


@pytest.fixture
async def agent(agent_server: FakeAgent) -> AsyncIterator[FakeAgent]:
    yield agent_server
    await agent_server.forget()


@pytest.fixture
async def collection(tmp_path: Path, agent: FakeAgent) -> AsyncIterator[Collection]:
    yield Collection(tmp_path, agent)
    await close_client()


class Collection:
    """A finished collection of three rows with two rollouts each, and more runs of it."""

    def __init__(self, folder: Path, agent: FakeAgent) -> None:
        self.agent = agent
        self.folder = folder
        self.input = write_rows(folder / "rows.jsonl", *({"id": number} for number in range(3)))
        self.output = folder / "out.jsonl"
        self.failures = folder / "out_failures.jsonl"
        self.record = folder / "out_run.json"

    async def run(self, **options: Any) -> CollectionSummary:
        job = RolloutCollectionConfig(
            **{"input_path": self.input, "output_path": self.output, "num_repeats": 2, **options}
        )
        return await RolloutCollector(job, ServerClient.from_config(self.agent.config("agent", "other"))).run()

    def done(self) -> list[tuple[int, int]]:
        return sorted((line["_ng_task_index"], line["_ng_rollout_index"]) for line in read_lines(self.output))


EVERYTHING = [(task, rollout) for task in range(3) for rollout in range(2)]


async def test_resuming_a_complete_collection_runs_nothing(collection: Collection) -> None:
    await collection.run(agent="agent")
    summary = await collection.run(agent="agent", resume=True)

    assert summary.complete
    assert (summary.already_done, summary.finished) == (6, 0)
    assert len(collection.agent.calls) == 6


async def test_resuming_where_there_is_nothing_starts_anew(collection: Collection) -> None:
    assert (await collection.run(agent="agent", resume=True)).finished == 6


@pytest.mark.parametrize("kept", [0, 1, 3, 5])
@pytest.mark.parametrize("torn", [b"", b"{", b'{"reward":1.0,"resp'])
async def test_resuming_makes_exactly_what_is_missing(collection: Collection, kept: int, torn: bytes) -> None:
    await collection.run(agent="agent")
    lines = collection.output.read_bytes().splitlines(keepends=True)
    collection.output.write_bytes(b"".join(lines[:kept]) + torn)
    summary = await collection.run(agent="agent", resume=True)

    assert (summary.already_done, summary.finished) == (kept, 6 - kept)
    assert collection.done() == EVERYTHING


async def test_a_last_line_that_lacks_only_its_end_is_kept(collection: Collection) -> None:
    await collection.run(agent="agent")
    collection.output.write_bytes(collection.output.read_bytes().removesuffix(b"\n"))
    summary = await collection.run(agent="agent", resume=True)

    assert summary.already_done == 6
    assert collection.done() == EVERYTHING
    assert collection.output.read_bytes().endswith(b"}\n")


async def test_a_failed_rollout_is_made_again_and_leaves_the_failures_file(collection: Collection) -> None:
    write_rows(collection.input, {"id": 0, "behaviours": [500]}, {"id": 1}, {"id": 2, "behaviours": [500]})
    await collection.run(agent="agent")
    assert len(read_lines(collection.failures)) == 4

    write_rows(collection.input, {"id": 0}, {"id": 1}, {"id": 2, "behaviours": [400]})
    summary = await collection.run(agent="agent", resume=True)

    assert (summary.already_done, summary.finished, summary.failed) == (2, 2, 2)
    assert [(line["_ng_task_index"], line["status"]) for line in read_lines(collection.failures)] == [
        (2, 400),
        (2, 400),
    ]


async def test_a_torn_line_in_the_failures_file_is_dropped(collection: Collection) -> None:
    write_rows(collection.input, {"behaviours": [500]})
    await collection.run(agent="agent")
    with collection.failures.open("ab") as file:
        file.write(b'{"_ng_task_index":0,"_ng_ro')
    await collection.run(agent="agent", resume=True)

    assert len(read_lines(collection.failures)) == 2


async def test_more_rows_and_more_repeats_may_join(collection: Collection) -> None:
    await collection.run(agent="agent", limit=1, num_repeats=1)
    summary = await collection.run(agent="agent", resume=True)

    assert (summary.already_done, summary.finished) == (1, 5)
    assert collection.done() == EVERYTHING


@pytest.mark.parametrize("options", [{"limit": 2}, {"num_repeats": 1}])
async def test_an_output_with_rollouts_that_the_run_does_not_have_is_refused(
    collection: Collection, options: dict[str, Any]
) -> None:
    await collection.run(agent="agent")
    before = collection.output.read_bytes()
    with pytest.raises(DatasetError, match="which this run does not have"):
        await collection.run(agent="agent", resume=True, **options)
    assert collection.output.read_bytes() == before


async def test_results_of_another_input_are_refused(collection: Collection) -> None:
    await collection.run(agent="agent")
    write_rows(collection.input, *({"id": f"other {number}"} for number in range(3)))
    with pytest.raises(DatasetError, match=r"out\.jsonl, line 1: was made from another row"):
        await collection.run(agent="agent", resume=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"agent": "other"}, 'agent "agent"'),
        ({"responses_create_params": {"temperature": 1}}, "responses_create_params {}"),
        ({"run_settings": {"model": "b"}}, 'model "a", and this run has "b"'),
        ({"run_settings": {}}, "this run has null"),
    ],
)
async def test_results_of_other_settings_are_refused_by_name(
    collection: Collection, options: dict[str, Any], named: str
) -> None:
    settings: dict[str, Any] = {"agent": "agent", "run_settings": {"model": "a"}}
    await collection.run(**settings)
    with pytest.raises(UsageError, match=named):
        await collection.run(**{**settings, **options}, resume=True)


async def test_an_existing_output_is_refused_unless_resumed_or_overwritten(collection: Collection) -> None:
    await collection.run(agent="agent")
    with pytest.raises(UsageError, match=r"--resume.*--overwrite"):
        await collection.run(agent="agent")
    assert collection.done() == EVERYTHING

    write_rows(collection.input, {"id": "new", "behaviours": [500]})
    summary = await collection.run(agent="agent", overwrite=True)
    assert (summary.total, summary.failed) == (2, 2)
    assert collection.done() == []


@pytest.mark.parametrize("name", ["out_failures.jsonl", "out_metrics.json"])
async def test_a_file_beside_the_output_that_cannot_be_replaced_is_named(collection: Collection, name: str) -> None:
    (collection.folder / name).mkdir()
    with pytest.raises(NemoGymError, match=f"can't remove {collection.folder / name}"):
        await collection.run(agent="agent")


async def test_a_file_that_no_collector_wrote_is_refused(collection: Collection) -> None:
    collection.output.write_text('{"some": "file"}\n')
    with pytest.raises(DatasetError, match="not a result of a rollout collection"):
        await collection.run(agent="agent", resume=True)
    assert collection.output.read_text() == '{"some": "file"}\n'


async def test_a_result_that_is_there_twice_is_refused(collection: Collection) -> None:
    await collection.run(agent="agent")
    lines = collection.output.read_bytes().splitlines(keepends=True)
    collection.output.write_bytes(b"".join([*lines, lines[0]]))
    with pytest.raises(DatasetError, match=r"line 7: holds .* a second time"):
        await collection.run(agent="agent", resume=True)


async def test_a_damaged_run_record_is_refused(collection: Collection) -> None:
    await collection.run(agent="agent")
    collection.record.write_text("{}")
    with pytest.raises(DatasetError, match="not the record"):
        await collection.run(agent="agent", resume=True)


async def test_the_run_record_tells_what_the_output_was_made_from(collection: Collection) -> None:
    await collection.run(agent="agent", run_settings={"model": "a"})
    record = orjson.loads(collection.record.read_bytes())

    assert record["input"] == str(collection.input)
    assert (record["agent"], record["num_repeats"], record["limit"]) == ("agent", 2, None)
    assert record["settings"] == {"model": "a"}


async def test_an_output_that_another_collector_writes_is_refused(collection: Collection) -> None:
    with (
        ResultsFile.open(collection.output),
        pytest.raises(UsageError, match="being written by another process"),
    ):
        await collection.run(agent="agent")
    assert (await collection.run(agent="agent")).complete


async def test_an_output_in_a_folder_that_cannot_be_made_is_refused(collection: Collection) -> None:
    with pytest.raises(UsageError, match="can't write"):
        await collection.run(agent="agent", output_path=collection.input / "out.jsonl")
