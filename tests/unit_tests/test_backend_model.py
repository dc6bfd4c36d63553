"""The base of model servers with a backend, by a small server of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import Body
from pydantic import PrivateAttr
from starlette.testclient import TestClient

from nemo_gym.backend_model import BackendModel, BackendModelConfig
from nemo_gym.errors import ConversionError, ModelBackendError
from nemo_gym.openai_utils import (
    NeMoGymAsyncOpenAI,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server_utils import ServerClient
from tests.fake_backend import FakeBackend, running_fake_backend


class OneBackendConfig(BackendModelConfig):
    base_url: str


class OneBackend(BackendModel):
    config: OneBackendConfig

    _client: NeMoGymAsyncOpenAI = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._client = self.client_for(self.config.base_url, "key")

    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        if body.previous_response_id:
            raise ConversionError("can't do that")
        return self.checked(NeMoGymResponse, await self._client.create_response(input="Hi", model="m"), "http://x")

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        return self.checked_completion({"id": "c", "created": 1, "model": "m", "choices": []}, "http://x")


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeBackend]:
    with running_fake_backend() as process:
        yield process


def build(base_url: str, **settings: Any) -> OneBackend:
    config = OneBackendConfig.model_validate(
        {"host": "", "port": 0, "entrypoint": "", "name": "one", "base_url": base_url, **settings}
    )
    return OneBackend(config=config, server_client=MagicMock(spec=ServerClient))


def test_the_configured_limits_reach_the_client() -> None:
    settings = {
        "max_retries": 7,
        "timeout_s": 1.5,
        "connect_timeout_s": 2.5,
        "max_concurrency": 3,
        "retry_delay_s": 0.25,
        "max_retry_delay_s": 9.0,
        "use_env_proxy": True,
    }
    client = build("http://x", **settings)._client
    assert client.model_dump(include=set(settings)) == settings


def test_connections_are_closed_with_the_server_and_it_can_start_again(fake: FakeBackend) -> None:
    server = build(fake.base_url)
    for _ in range(2):
        with TestClient(server.setup_webserver()) as client:
            assert client.post("/v1/responses", json={"input": "Hi"}).status_code == 200
        # An open session would be a ResourceWarning here, which is an error.
        assert server._client._session is None


def test_a_reply_of_the_wrong_shape_is_told_with_the_fields_that_are_wrong() -> None:
    with pytest.raises(
        ModelBackendError, match=r"at http://x answered 200 with JSON that is no Response: id: Field"
    ) as caught:
        build("http://x").checked(NeMoGymResponse, {"model": "m"}, "http://x")
    assert (caught.value.status, caught.value.http_status) == (200, 502)


def test_a_request_that_can_not_be_converted_is_the_callers_mistake() -> None:
    with TestClient(build("http://x").setup_webserver()) as client:
        reply = client.post("/v1/responses", json={"input": "Hi", "previous_response_id": "r"})
    assert (reply.status_code, reply.json()) == (400, {"detail": "can't do that"})


def test_a_completion_without_choices_is_a_bad_gateway() -> None:
    with TestClient(build("http://x").setup_webserver()) as client:
        reply = client.post("/v1/chat/completions", json={"messages": []})
    assert reply.status_code == 502
    assert reply.json()["upstream"] == {"url": "http://x", "status": 200, "attempts": 1}


def test_the_proxy_of_the_environment_is_used_only_when_asked_for(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", fake.origin)
    monkeypatch.setenv("no_proxy", "")

    async def reach(*, use_env_proxy: bool) -> None:
        settings = {"use_env_proxy": use_env_proxy, "max_retries": 0}
        client = NeMoGymAsyncOpenAI.model_validate({"base_url": "http://backend.invalid/v1", **settings})
        async with client:
            await client.create_response(model="m", input="Hi")

    asyncio.run(reach(use_env_proxy=True))
    with pytest.raises(ModelBackendError, match="can't be found"):
        asyncio.run(reach(use_env_proxy=False))
