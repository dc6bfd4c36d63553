"""Both model servers against a backend in a real process that misbehaves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from nemo_gym.server_utils import ServerClient
from responses_api_models.openai_model.app import OpenAIModel, OpenAIModelConfig
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig
from tests.fake_backend import FakeBackend, running_fake_backend

KEY = "sk-very-secret"
HELLO = {"input": "Hello"}
CHAT_HELLO = {"messages": [{"role": "user", "content": "Hello"}]}

KINDS = ("openai_model", "vllm_model")
ROUTES = pytest.mark.parametrize(
    ("kind", "path", "body"),
    [(kind, "/v1/responses", HELLO) for kind in KINDS] + [(kind, "/v1/chat/completions", CHAT_HELLO) for kind in KINDS],
    ids=[f"{kind}-{api}" for api in ("responses", "chat") for kind in KINDS],
)


@pytest.fixture(scope="module")
def fake_process() -> Iterator[FakeBackend]:
    with running_fake_backend() as fake:
        yield fake


@pytest.fixture
def fake(fake_process: FakeBackend) -> FakeBackend:
    fake_process.reset()
    return fake_process


@contextmanager
def serving(kind: str, base_url: str, **settings: Any) -> Iterator[TestClient]:
    common: dict[str, Any] = {"host": "", "port": 0, "entrypoint": "", "name": kind}
    common |= {"retry_delay_s": 0.01, **settings}
    server: OpenAIModel | VLLMModel
    if kind == "openai_model":
        config = {**common, "openai_base_url": base_url, "openai_api_key": KEY, "openai_model": "fake-model"}
        server = OpenAIModel(config=OpenAIModelConfig(**config), server_client=MagicMock(spec=ServerClient))
    else:
        vllm_config = VLLMModelConfig(**common, base_url=base_url, api_key=KEY, model="fake-model")
        server = VLLMModel(config=vllm_config, server_client=MagicMock(spec=ServerClient))
    with TestClient(server.setup_webserver()) as client:
        yield client


@ROUTES
def test_the_backend_gets_the_configured_model_and_key_and_its_answer_comes_back(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any]
) -> None:
    with serving(kind, fake.base_url) as client:
        reply = client.post(path, json=body | {"model": "another"})
    assert reply.status_code == 200
    assert "Hello from the fake." in reply.text
    (call,) = fake.calls()
    assert call["body"]["model"] == "fake-model"
    assert call["headers"]["Authorization"] == f"Bearer {KEY}"


@ROUTES
@pytest.mark.parametrize("failure", ["429:0.01", "429", "500", "503:0", "close", "close_mid_body"])
def test_a_passing_failure_is_tried_again(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any], failure: str
) -> None:
    fake.script(failure)
    with serving(kind, fake.base_url, max_retries=1) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200
    assert len(fake.calls()) == 2


@ROUTES
@pytest.mark.parametrize(
    ("failure", "status", "told"),
    [
        ("429:0.01", 429, "answered 429: the fake says 429 (after 2 attempts)"),
        ("500", 500, "answered 500: the fake says 500 (after 2 attempts)"),
        ("close", 502, "closed the connection without an answer (after 2 attempts)"),
        ("close_mid_body", 502, "closed the connection in the middle of its answer (after 2 attempts)"),
    ],
)
def test_a_lasting_failure_is_reported_after_the_configured_number_of_attempts(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any], failure: str, status: int, told: str
) -> None:
    fake.script(failure, failure, "ok")
    with serving(kind, fake.base_url, max_retries=1) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == status
    assert told in reply.json()["detail"]
    assert fake.base_url in reply.json()["detail"]
    assert reply.json()["upstream"]["attempts"] == 2
    assert len(fake.calls()) == 2


@ROUTES
@pytest.mark.parametrize(
    ("failure", "status", "told"),
    [
        ("400", 400, "answered 400: the fake says 400"),
        ("401", 401, "answered 401: the fake says 401"),
        ("410", 502, "answered 410: the fake says 410"),
        ("invalid_json", 502, "answered 200 with a body that is not JSON"),
        ("json_array", 502, "answered 200 with JSON that is not an object"),
        ("wrong_shape", 502, "answered 200 with JSON that is no"),
        ("redirect", 502, "points to http://elsewhere.invalid/v1/responses; change the base URL"),
    ],
)
def test_a_failure_that_another_attempt_would_not_mend_is_reported_at_once(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any], failure: str, status: int, told: str
) -> None:
    fake.script(failure)
    with serving(kind, fake.base_url) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == status
    assert told in reply.json()["detail"]
    assert len(fake.calls()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_empty_choices_are_no_answer(fake: FakeBackend, kind: str) -> None:
    with serving(kind, fake.base_url) as client:
        fake.script("empty_choices")
        reply = client.post("/v1/chat/completions", json=CHAT_HELLO)
        assert (reply.status_code, len(fake.calls())) == (502, 1)
        assert "no choices" in reply.json()["detail"]


def test_empty_choices_are_no_answer_to_a_converted_request(fake: FakeBackend) -> None:
    fake.script("empty_choices")
    with serving("vllm_model", fake.base_url) as client:
        reply = client.post("/v1/responses", json=HELLO)
    assert reply.status_code == 502
    assert "no choices" in reply.json()["detail"]


@ROUTES
def test_a_backend_slower_than_the_limit_is_a_gateway_timeout_and_not_asked_again(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any]
) -> None:
    fake.script("slow:30")
    with serving(kind, fake.base_url, timeout_s=0.2) as client:
        started = time.monotonic()
        reply = client.post(path, json=body)
        assert time.monotonic() - started < 10
    assert reply.status_code == 504
    assert "did not answer within 0.2 s" in reply.json()["detail"]
    assert len(fake.calls()) == 1


@ROUTES
def test_a_backend_that_is_slow_within_the_limit_is_waited_for(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any]
) -> None:
    fake.script("slow:0.3")
    with serving(kind, fake.base_url, timeout_s=30) as client:
        assert client.post(path, json=body).status_code == 200
    assert len(fake.calls()) == 1


@ROUTES
def test_an_unreachable_backend_is_a_bad_gateway(kind: str, path: str, body: dict[str, Any]) -> None:
    with running_fake_backend() as gone:
        pass
    with serving(kind, gone.base_url, max_retries=1) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 502
    assert "can't be reached: Connection refused (after 2 attempts)" in reply.json()["detail"]


@ROUTES
def test_a_wait_longer_than_the_configured_one_is_passed_on_to_the_caller(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any]
) -> None:
    fake.script("429:120")
    with serving(kind, fake.base_url, max_retry_delay_s=60) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 429
    assert reply.headers["Retry-After"] == "120"
    assert len(fake.calls()) == 1


@ROUTES
def test_the_key_is_in_no_reply_and_no_log(
    fake: FakeBackend, kind: str, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fake.script("leak_key")
    with caplog.at_level("DEBUG"), serving(kind, fake.base_url) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 401
    assert "Bearer ***" in reply.json()["detail"]
    assert KEY not in reply.text + caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_the_counter_is_played_to_its_end_turn_by_turn(fake: FakeBackend, kind: str) -> None:
    names = ("increment_counter", "get_counter_value")
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]
    conversation: list[dict[str, Any]] = [{"role": "user", "content": "Add 1, add 2, read."}]
    counter, calls = 0, []
    with serving(kind, fake.base_url) as client:
        for _ in range(4):
            reply = client.post("/v1/responses", json={"input": conversation, "tools": tools})
            assert reply.status_code == 200, reply.text
            (item,) = reply.json()["output"]
            conversation.append(item)
            if item["type"] == "message":
                break
            calls.append(item["name"])
            counter += json.loads(item["arguments"]).get("count", 0)
            conversation.append({"type": "function_call_output", "call_id": item["call_id"], "output": str(counter)})
    assert calls == ["increment_counter", "increment_counter", "get_counter_value"]
    assert conversation[-1]["content"][0]["text"] == "The counter says 3."
    assert reply.json()["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }
