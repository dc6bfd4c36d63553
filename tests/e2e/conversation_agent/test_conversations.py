"""The conversation agent on four workers: every conversation is found again, or its caller is told that it is lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.global_config import load_global_config
from nemo_gym.paths import EXTRA_ROOTS_ENV, STATE_DIR_ENV
from nemo_gym.session_routing import SOCKET_DIR_ENV
from tests.e2e.session_routing.clients import Client, Reply
from tests.e2e.session_routing.processes import Servers, deployed, is_over, processes_of, until

HERE = Path(__file__).parent
CONVERSATIONS = 200
TURNS = 5
WORKERS = 4


class Talk(Client):
    """One conversation: nothing is carried from a request to the next but the cookie, not even the connection."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(url)
        self.number = number
        self.said: list[str] = []

    async def take_turn(self) -> Reply:
        self.said.append(f"{self.number}/{len(self.said)}")
        return await self.post("/v1/responses", input=self.said[-1])

    def assert_remembered(self, reply: Reply) -> None:
        assert reply.status == 200, reply.body
        response: dict[str, Any] = reply.json()
        assert response["output"][0]["content"][0]["text"] == " ".join(self.said)
        assert response["metadata"]["steps_used"] == str(len(self.said))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a user's folder, and see that nothing is left of what was started in it."""
    folder = tmp_path_factory.mktemp("conversations")
    # Short, as the path of a socket has about 100 bytes.
    sockets = Path(tempfile.mkdtemp(prefix="talk-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR_ENV, str(folder / "state"))
        patch.setenv(SOCKET_DIR_ENV, str(sockets))
        patch.setenv(EXTRA_ROOTS_ENV, str(HERE / "components"))
        yield folder
    left = list(sockets.rglob("*"))
    shutil.rmtree(sockets)
    assert left == []
    assert processes_of(folder / "state") == []


@pytest.fixture(scope="module")
async def servers(work: Path) -> AsyncIterator[Servers]:
    config = load_global_config([HERE / "servers.yaml"], working_dir=work)
    async with deployed(config, work) as servers:
        assert len(await servers.all_workers("agent")) == WORKERS
        yield servers


@asynccontextmanager
async def talks(url: str) -> AsyncIterator[list[Talk]]:
    """Yield conversations that are yet to begin."""
    begun = [Talk(url, number) for number in range(CONVERSATIONS)]
    try:
        yield begun
    finally:
        await asyncio.gather(*map(Talk.close, begun))


async def all_remember(talks: Sequence[Talk]) -> None:
    """Take a turn in all of them at once."""
    for talk, reply in zip(talks, await asyncio.gather(*map(Talk.take_turn, talks)), strict=True):
        talk.assert_remembered(reply)


async def test_every_conversation_is_remembered_whichever_workers_accept_its_requests(servers: Servers) -> None:
    async with talks(servers.url("agent")) as begun:
        for _ in range(TURNS):
            await all_remember(begun)
        owners = {talk.owner for talk in begun}
        assert len(owners) > 1
        assert owners <= servers.workers("agent").keys()
        whole = await begun[0].post("/conversation")
        assert len(whole.json()["items"]) == 2 * TURNS


async def test_a_killed_worker_loses_its_own_conversations_and_no_others(servers: Servers) -> None:
    workers = await servers.all_workers("agent")
    async with talks(servers.url("agent")) as begun:
        for _ in range(2):
            await all_remember(begun)
        victim = begun[0].owner
        assert victim is not None
        workers[victim].kill()
        await until(lambda: is_over(workers[victim]))
        lost = [talk for talk in begun if talk.owner == victim]
        kept = [talk for talk in begun if talk.owner != victim]
        assert lost
        assert kept
        for _ in range(2):
            for reply in await asyncio.gather(*map(Talk.take_turn, lost)):
                assert reply.status == 410
                assert "Start a new session" in reply.json()["detail"]
            await all_remember(kept)
        for path in ("/notes", "/conversation"):
            assert (await lost[0].post(path)).status == 410
    await servers.all_workers("agent")
    async with talks(servers.url("agent")) as anew:
        await all_remember(anew)


async def test_requests_of_one_conversation_sent_at_once_are_all_taken(servers: Servers) -> None:
    talk = Talk(servers.url("agent"), 0)
    try:
        talk.assert_remembered(await talk.take_turn())
        replies = await asyncio.gather(*(talk.post("/v1/responses", input=str(number)) for number in range(20)))
        lengths = [len(reply.json()["output"][0]["content"][0]["text"].split()) for reply in replies]
        assert sorted(lengths) == list(range(2, 22))
        whole = (await talk.post("/conversation")).json()
        assert {item["content"] for item in whole["items"] if item["role"] == "user"} == {"0/0", *map(str, range(20))}
    finally:
        await talk.close()
