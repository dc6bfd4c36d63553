"""The base of Gymnasium environments, with a small environment of our own, over HTTP in this process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI, Request
from pydantic import PrivateAttr
from starlette.testclient import TestClient

from nemo_gym.base_gymnasium_server import (
    Environment,
    Episode,
    GymnasiumSeedSessionRequest,
    GymnasiumSeedSessionResponse,
    GymnasiumServer,
    GymnasiumServerConfig,
    plain,
)
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient

RESPONSE = {"id": "resp_1", "created_at": 0, "model": "test", "object": "response", "output": []}
WAIT_LIMIT_S = 20


class Corridor:
    """A walk to the end of a corridor, whose length is hidden and depends on the seed; a step to the end pays 1.

    The action -99 breaks it, and 99 takes until `release`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.closed = 0
        self.threads: set[int] = set()
        self.entered = threading.Event()
        self.release = threading.Event()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options == {"broken": True}:
            raise ValueError("no such corridor")
        self.place, self.steps = 0, 0
        self.length = 2 + (seed or 0) % 3
        return (self.place,), {"options": options}

    def step(self, action: int, /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        if action == -99:
            raise RuntimeError("secret insides")
        if action == 99:
            self.entered.set()
            assert self.release.wait(WAIT_LIMIT_S)
        self.place += action
        self.steps += 1
        reward = float("nan") if action == 1000 else 1.0 if self.place >= self.length else -0.25
        return (self.place,), reward, self.place >= self.length, self.steps >= self.limit, {}

    def close(self) -> None:
        self.closed += 1


class CorridorSeed(GymnasiumSeedSessionRequest):
    limit: int = 10


class CorridorServer(GymnasiumServer):
    _made: list[Corridor] = PrivateAttr(default_factory=list)

    def make_environment(self, body: CorridorSeed) -> Environment:
        self._made.append(Corridor(body.limit))
        return self._made[-1]

    def to_action(self, episode: Episode, action: Any) -> int:
        if action == "far":
            raise ValueError(f"walk a whole number of steps, not {action!r}")
        return int(action)

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: CorridorSeed
    ) -> GymnasiumSeedSessionResponse:
        return await super().seed_session(request, body)


class UnthreadedServer(CorridorServer):
    in_threads: ClassVar[bool] = False


def build(kind: type[CorridorServer] = CorridorServer, **settings: Any) -> tuple[CorridorServer, FastAPI]:
    config = GymnasiumServerConfig(host="", port=0, entrypoint="", name="corridor", **settings)
    server = kind(config=config, server_client=MagicMock(spec=ServerClient))
    return server, server.setup_webserver()


def seeded(app: FastAPI, **row: Any) -> TestClient:
    """Begin a session; the client carries its cookie from here on."""
    client = TestClient(app)
    reply = client.post("/seed_session", json={"seed": 0, "id": "a field of the row", **row})
    assert reply.status_code == 200
    assert reply.json()["observation"] == [0]
    return client


def step(client: TestClient, action: Any) -> Any:
    return client.post("/step", json={"action": action})


def verify(client: TestClient) -> Any:
    return client.post("/verify", json={"responses_create_params": {"input": "go"}, "response": RESPONSE, "id": "row"})


def test_an_episode_is_stepped_to_its_end_and_its_return_is_the_reward() -> None:
    _, app = build()
    client = seeded(app)
    on_the_way = {"observation": [1], "reward": -0.25, "terminated": False, "truncated": False, "info": {}}
    assert step(client, 1).json() == on_the_way
    assert client.post("/observe", json={}).json() == {
        "observation": [1],
        "steps": 1,
        "terminated": False,
        "truncated": False,
    }
    assert step(client, 1).json()["terminated"] is True
    verdict = verify(client).json()
    assert (verdict["reward"], verdict["episode_return"], verdict["steps"], verdict["id"]) == (0.75, 0.75, 2, "row")
    assert (verdict["terminated"], verdict["truncated"]) == (True, False)
    assert verify(client).json() == verdict


def test_a_step_after_the_end_is_refused_and_changes_nothing() -> None:
    _, app = build()
    done, cut = seeded(app), seeded(app, limit=1)
    step(done, 2)
    step(cut, 1)
    for client, how in ((done, "terminated"), (cut, "truncated")):
        before = verify(client).json()
        late = step(client, 1)
        assert late.status_code == 409
        assert f"the episode is over: {how} after 1 steps" in late.json()["detail"]
        assert verify(client).json() == before


def test_an_action_that_is_none_is_refused_and_changes_nothing() -> None:
    _, app = build()
    client = seeded(app)
    refused = step(client, "far")
    assert (refused.status_code, refused.json()["detail"]) == (422, "walk a whole number of steps, not 'far'")
    assert client.post("/step", json={}).status_code == 422
    assert client.post("/step", json={"action": 1, "speed": 2}).status_code == 422
    assert client.post("/observe", json={}).json()["steps"] == 0


def test_an_action_outside_the_environments_space_is_refused() -> None:
    class Space:
        def contains(self, action: Any) -> bool:
            return action in (0, 1)

        def __repr__(self) -> str:
            return "Discrete(2)"

    server, _ = build()
    environment = Corridor(1)
    episode = Episode(environment, None)
    assert GymnasiumServer.to_action(server, episode, [5]) == [5]
    environment.action_space = Space()  # type: ignore[attr-defined]
    assert GymnasiumServer.to_action(server, episode, 1) == 1
    with pytest.raises(ValueError, match=r"5 is no action of Discrete\(2\)"):
        GymnasiumServer.to_action(server, episode, 5)


@pytest.mark.parametrize("path", ["/step", "/observe", "/verify"])
def test_a_session_that_was_never_seeded_is_refused(path: str) -> None:
    _, app = build()
    body = {"/step": {"action": 1}, "/observe": {}}.get(path, {"responses_create_params": {"input": ""}})
    client = TestClient(app)
    for _ in range(2):
        reply = client.post(path, json=body | ({"response": RESPONSE} if path == "/verify" else {}))
        assert (reply.status_code, "/seed_session" in reply.json()["detail"]) == (410, True)


def test_sessions_have_environments_of_their_own_and_seeds_decide() -> None:
    _, app = build()
    short, long = seeded(app, seed=3), seeded(app, seed=4)
    assert step(short, 2).json()["terminated"] is True
    assert step(long, 2).json()["terminated"] is False


def test_seeding_anew_begins_anew_and_closes_what_was() -> None:
    server, app = build()
    client = seeded(app)
    step(client, 2)
    client.post("/seed_session", json={"seed": 1})
    assert verify(client).json()["steps"] == 0
    assert [one.closed for one in server._made] == [1, 0]


def test_beyond_the_limit_the_one_untouched_for_longest_is_closed() -> None:
    server, app = build(max_sessions=2)
    first, second = seeded(app), seeded(app)
    assert step(first, 1).status_code == 200
    seeded(app)
    assert [one.closed for one in server._made] == [0, 1, 0]
    assert step(second, 1).status_code == 410
    assert step(first, 1).status_code == 200


async def test_a_released_episode_is_closed_once() -> None:
    server, app = build()
    session: dict[str, str] = {}

    @app.post("/who")
    async def who(request: Request) -> None:
        session.update(request.session)

    client = seeded(app)
    client.post("/who")
    for _ in range(2):
        await server.release(session[SESSION_ID_KEY])
    assert server._made[0].closed == 1
    assert step(client, 1).status_code == 410


def test_a_session_that_ends_closes_its_environment() -> None:
    server, app = build(session_end={"after_verify": True})
    with TestClient(app) as closed, TestClient(app) as verified:
        for client in (closed, verified):
            client.post("/seed_session", json={})
        assert closed.post("/close_session").status_code == 200
        assert verify(verified).status_code == 200
        assert step(closed, 1).status_code == step(verified, 1).status_code == 410
    assert [one.closed for one in server._made] == [1, 1]


def test_a_release_waits_for_the_step_under_way_and_later_ones_are_refused() -> None:
    server, app = build(max_sessions=1)
    with TestClient(app) as client, ThreadPoolExecutor() as threads:
        client.post("/seed_session", json={})
        cookies = {"cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items())}
        client.cookies.clear()
        slow = threads.submit(client.post, "/step", json={"action": 99}, headers=cookies)
        assert server._made[0].entered.wait(WAIT_LIMIT_S)
        behind = threads.submit(client.post, "/observe", json={}, headers=cookies)
        # Another session takes the only place.
        other = threads.submit(client.post, "/seed_session", json={})
        assert not slow.done()
        assert server._made[0].closed == 0
        server._made[0].release.set()
        assert slow.result(WAIT_LIMIT_S).json()["reward"] == 1.0
        assert behind.result(WAIT_LIMIT_S).status_code in (200, 410)
        assert other.result(WAIT_LIMIT_S).status_code == 200
        assert server._made[0].closed == 1
        assert client.post("/step", json={"action": 1}, headers=cookies).status_code == 410


@pytest.mark.parametrize("action", [-99, 1000])
def test_an_environment_that_breaks_has_no_reward(action: int) -> None:
    _, app = build()
    client = seeded(app)
    step(client, 1)
    for reply in (step(client, action), step(client, 1), client.post("/observe", json={}), verify(client)):
        assert reply.status_code == 500
        assert "the environment failed at step 2" in reply.json()["detail"]
        assert "secret" not in reply.text
    assert client.post("/seed_session", json={}).status_code == 200
    assert step(client, 1).status_code == 200


def test_an_environment_that_can_not_be_reset_is_closed_and_the_session_keeps_what_it_had() -> None:
    server, app = build()
    client = TestClient(app, raise_server_exceptions=False)
    client.post("/seed_session", json={})
    assert client.post("/seed_session", json={"options": {"broken": True}}).status_code == 500
    assert [one.closed for one in server._made] == [0, 1]
    assert step(client, 1).status_code == 200


@pytest.mark.parametrize(("kind", "apart"), [(CorridorServer, True), (UnthreadedServer, False)])
def test_blocking_environments_run_in_threads(kind: type[CorridorServer], apart: bool) -> None:
    server, app = build(kind)
    loop_threads = set()

    @app.post("/loop")
    async def loop() -> None:
        loop_threads.add(threading.get_ident())

    with TestClient(app) as client:
        client.post("/loop")
        client.post("/seed_session", json={})
        client.post("/step", json={"action": 1})
    assert (server._made[0].threads != loop_threads) is apart


def test_observations_become_plain_json() -> None:
    class Array:
        def tolist(self) -> list[tuple[int, ...]]:
            return [(1, 2), (3,)]

    assert plain({"a": (1, 2.5, None), 5: Array(), "b": [True, "x"]}) == {
        "a": [1, 2.5, None],
        "5": [[1, 2], [3]],
        "b": [True, "x"],
    }
    with pytest.raises(TypeError, match="object is no JSON: override to_json"):
        plain([object()])
