"""Each life ends exactly once, whatever races with whatever."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from nemo_gym.server.session_end import SessionEndMiddleware, SessionEndRules
from nemo_gym.server.session_lives import SessionEndReason, SessionLives

SESSIONS = ("a", "b", "c")


class World:
    """Sessions under a middleware, whose handlers and hook check that neither ever sees what it must not."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.holds: dict[str, int] = dict.fromkeys(SESSIONS, 0)
        self.handling: dict[str, int] = dict.fromkeys(SESSIONS, 0)
        self.begun = dict.fromkeys(SESSIONS, 0)
        self.ended = dict.fromkeys(SESSIONS, 0)
        self.reasons: set[SessionEndReason] = set()
        self.statuses: set[int] = set()
        # Of the order of what a handler takes, so that it happens in between.
        self.lives = SessionLives("world", self.hook, idle_timeout_s=0.004)
        rules = SessionEndRules(0.004, final_path="/verify")
        self.app = SessionEndMiddleware(self.handle, lives=self.lives, rules=rules)

    async def pause(self) -> None:
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)
        if self.chance.random() < 0.2:
            await asyncio.sleep(self.chance.random() * 0.006)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id = scope["session"]["session_id"]
        self.handling[session_id] += 1
        try:
            if scope["path"] == "/seed_session":
                self.begun[session_id] += not self.holds[session_id]
                self.holds[session_id] = 1
            else:
                assert self.holds[session_id], "a session was served that is over or never began"
            await self.pause()
            status = self.chance.choice((200, 200, 500))
            if self.chance.random() < 0.1:
                raise RuntimeError("the handler failed")
            await send({"type": "http.response.start", "status": status, "headers": []})
            await self.pause()
            await send({"type": "http.response.body", "body": b"{}"})
            await self.pause()
        finally:
            self.handling[session_id] -= 1

    async def hook(self, session_id: str, reason: SessionEndReason) -> None:
        assert not self.handling[session_id], "the hook runs while a request is in flight"
        assert self.holds[session_id] == 1, "the hook has run already"
        await self.pause()
        assert not self.handling[session_id]
        self.holds[session_id] = 0
        self.ended[session_id] += 1
        self.reasons.add(reason)
        if self.chance.random() < 0.2:
            raise ValueError("the hook failed")

    async def request(self, path: str, session_id: str) -> int:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            await asyncio.sleep(0)
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "session": {"session_id": session_id}}
        try:
            await self.app(scope, receive, send)
        except RuntimeError:
            return 500
        status: int = sent[0]["status"]
        if path == "/close_session" and json.loads(sent[1]["body"])["closed"]:
            self.reasons.add(SessionEndReason.CLOSED)
        return status

    async def client(self) -> None:
        for _ in range(self.chance.randrange(1, 8)):
            path = self.chance.choice(("/seed_session", "/seed_session", "/tool", "/tool", "/verify", "/close_session"))
            request = asyncio.create_task(self.request(path, self.chance.choice(SESSIONS)))
            if self.chance.random() < 0.2:
                await self.pause()
                request.cancel()
            await asyncio.wait({request})
            if not request.cancelled():
                self.statuses.add(request.result())
            await self.pause()


@pytest.mark.promise("session-ends-once")
async def test_every_life_ends_exactly_once_and_never_beside_a_handler(caplog: pytest.LogCaptureFixture) -> None:
    reasons: set[SessionEndReason] = set()
    statuses: set[int] = set()
    for number in range(60):
        world = World(random.Random(number))
        async with asyncio.timeout(20), world.lives.running(5):
            clients = [asyncio.create_task(world.client()) for _ in range(6)]
            _, late = await asyncio.wait(clients, timeout=world.chance.choice((0.005, 5)))
            for client in late:
                client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        assert world.begun == world.ended, f"in world {number}"
        assert world.lives.statistics().live == world.lives.statistics().ending == 0
        assert world.lives.statistics().ended == sum(world.ended.values())
        reasons |= world.reasons
        statuses |= world.statuses
    assert "AssertionError" not in caplog.text
    assert reasons == set(SessionEndReason)
    assert {200, 410, 500} <= statuses <= {200, 410, 500, 503}


def lives_with(hook: Callable[[str, SessionEndReason], Awaitable[None]], **options: Any) -> SessionLives:
    return SessionLives("it", hook, **options)


async def test_of_two_reasons_the_first_counts() -> None:
    reasons: list[SessionEndReason] = []

    async def hook(_: str, reason: SessionEndReason) -> None:
        reasons.append(reason)

    lives = lives_with(hook)
    life = lives.begin("a")
    first = lives.end(life, SessionEndReason.IDLE)
    assert lives.end(life, SessionEndReason.CLOSED) is first
    await first
    assert (reasons, lives.find("a")) == ([SessionEndReason.IDLE], None)


async def test_at_the_stop_a_request_that_never_ends_is_waited_for_half_of_the_grace() -> None:
    reasons: list[SessionEndReason] = []

    async def hook(_: str, reason: SessionEndReason) -> None:
        reasons.append(reason)

    lives = lives_with(hook)
    loop = asyncio.get_running_loop()
    async with lives.running(0.4):
        stuck, closing = lives.begin("stuck"), lives.begin("closing")
        requests = [lives.using(life) for life in (stuck, closing)]
        for request in requests:
            request.__enter__()
        lives.end(closing, SessionEndReason.CLOSED)
        began = loop.time()
    assert 0.15 < loop.time() - began < 0.4
    assert sorted(reasons) == [SessionEndReason.CLOSED, SessionEndReason.STOPPING]


async def test_a_hook_that_cancels_itself_is_an_error_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    async def hook(_: str, reason: SessionEndReason) -> None:
        raise asyncio.CancelledError

    lives = lives_with(hook)
    await lives.end(lives.begin("a"), SessionEndReason.CLOSED)
    assert lives.find("a") is None
    assert "the end of session a was broken off" in caplog.text


async def test_idle_sessions_end_in_the_order_of_their_last_use_and_lives_may_run_again() -> None:
    ended: list[str] = []

    async def hook(session_id: str, reason: SessionEndReason) -> None:
        ended.append(session_id)

    lives = lives_with(hook, idle_timeout_s=0.03)
    for _ in range(2):
        ended.clear()
        async with lives.running(1), asyncio.timeout(5):
            begun = {name: lives.begin(name) for name in "abcd"}
            for name in "abcdb":
                with lives.using(begun[name]):
                    pass
            while len(ended) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert ended == ["a", "c", "d", "b"]
