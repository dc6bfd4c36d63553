"""Drives the counter server over HTTP, in this process."""

import importlib.util
import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

FOLDER = Path(__file__).parents[1]
ROWS = [json.loads(line) for line in (FOLDER / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()]
RESPONSE = {"id": "resp_1", "created_at": 0, "model": "test", "object": "response", "output": []}


def build(**settings: Any) -> FastAPI:
    config = StatefulCounterResourcesServerConfig(host="", port=0, entrypoint="", name="counter", **settings)
    return StatefulCounterResourcesServer(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()


def seeded(app: FastAPI, initial_count: int) -> TestClient:
    """Begin a session; the client carries its cookie from here on."""
    client = TestClient(app)
    assert client.post("/seed_session", json={"initial_count": initial_count}).status_code == 200
    return client


def verify(client: TestClient, expected_count: int, **row: Any) -> Any:
    body = {"responses_create_params": {"input": "hi"}, "response": RESPONSE, "expected_count": expected_count, **row}
    return client.post("/verify", json=body)


@pytest.fixture
def app() -> FastAPI:
    return build()


def test_tools_change_and_read_the_sessions_counter(app: FastAPI) -> None:
    client = seeded(app, 3)
    assert client.post("/increment_counter", json={"count": 4}).json() == {"success": True}
    assert client.post("/increment_counter", json={"count": -2}).json() == {"success": True}
    assert client.post("/get_counter_value", json={}).json() == {"count": 5}


def test_the_reward_is_one_only_at_the_expected_count(app: FastAPI) -> None:
    client = seeded(app, 3)
    client.post("/increment_counter", json={"count": 4})
    right, wrong = verify(client, 7, id="row-1").json(), verify(client, 8).json()
    assert (right["reward"], right["final_count"], right["id"]) == (1.0, 7, "row-1")
    assert (wrong["reward"], wrong["final_count"]) == (0.0, 7)


def test_sessions_do_not_see_each_others_counter(app: FastAPI) -> None:
    one, other = seeded(app, 1), seeded(app, 100)
    one.post("/increment_counter", json={"count": 5})
    assert other.post("/get_counter_value", json={}).json() == {"count": 100}
    assert one.post("/get_counter_value", json={}).json() == {"count": 6}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/increment_counter", {"count": 1}),
        ("/get_counter_value", {}),
        ("/verify", {"responses_create_params": {"input": "hi"}, "response": RESPONSE, "expected_count": 0}),
    ],
)
def test_a_session_that_was_never_seeded_is_refused_and_stays_unseeded(
    app: FastAPI, path: str, body: dict[str, Any]
) -> None:
    client = TestClient(app)
    for _ in range(2):
        reply = client.post(path, json=body)
        assert reply.status_code == 410
        assert "seed_session" in reply.json()["detail"]


@pytest.mark.parametrize("count", ["5", 5.0, True, None, [5]])
def test_an_amount_that_is_no_integer_is_refused_and_changes_nothing(app: FastAPI, count: Any) -> None:
    client = seeded(app, 3)
    assert client.post("/increment_counter", json={"count": count}).status_code == 422
    assert client.post("/increment_counter", json={}).status_code == 422
    assert client.post("/increment_counter", json={"count": 1, "by": 2}).status_code == 422
    assert client.post("/get_counter_value", json={}).json() == {"count": 3}


def test_verifying_may_be_repeated(app: FastAPI) -> None:
    client = seeded(app, 9)
    assert [verify(client, 9).json()["reward"] for _ in range(2)] == [1.0, 1.0]


def test_a_second_seed_starts_the_session_over(app: FastAPI) -> None:
    client = seeded(app, 9)
    client.post("/seed_session", json={"initial_count": 2})
    assert client.post("/get_counter_value", json={}).json() == {"count": 2}


def test_beyond_its_limit_the_counter_unused_for_longest_is_dropped_and_says_so() -> None:
    app = build(max_sessions=2)
    first, second = seeded(app, 1), seeded(app, 2)
    assert first.post("/get_counter_value", json={}).json() == {"count": 1}
    third = seeded(app, 3)
    assert second.post("/get_counter_value", json={}).status_code == 410
    assert first.post("/get_counter_value", json={}).json() == {"count": 1}
    assert third.post("/get_counter_value", json={}).json() == {"count": 3}


def test_every_example_row_can_be_seeded_and_verified(app: FastAPI) -> None:
    assert len(ROWS) == 50
    for row in ROWS:
        client = seeded(app, row["initial_count"])
        client.post("/increment_counter", json={"count": row["expected_count"] - row["initial_count"]})
        reply = client.post("/verify", json={**row, "response": RESPONSE})
        assert reply.json()["reward"] == 1.0, row["id"]


def test_example_rows_are_worded_differently_and_as_their_script_writes_them() -> None:
    texts = [row["responses_create_params"]["input"][0]["content"] for row in ROWS]
    assert len({text.casefold() for text in texts}) == len({row["id"] for row in ROWS}) == 50
    spec = importlib.util.spec_from_file_location("create_examples", FOLDER / "create_examples.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--check"]) == 0
    assert [script.in_words(number) for number in (0, 21, 105, 340)] == [
        "zero",
        "twenty-one",
        "one hundred and five",
        "three hundred and forty",
    ]
