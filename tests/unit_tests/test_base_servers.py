"""The three kinds of server as environments use them: built in a test, driven through `TestClient`."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI, Request, Response
from omegaconf import OmegaConf
from pydantic import Field, PrivateAttr
from starlette.testclient import TestClient

from nemo_gym.base_resources_server import (
    AggregateMetrics,
    BaseResourcesServerConfig,
    BaseRunRequest,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, Body, SimpleResponsesAPIAgent
from nemo_gym.base_responses_api_model import BaseResponsesAPIModelConfig, SimpleResponsesAPIModel
from nemo_gym.openai_utils import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server.secrets import SESSION_SECRET_KEY_NAME, derive_session_key, session_secrets
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from nemo_gym.session_routing import SESSION_OWNER_KEY

RESPONSE = {
    "id": "resp_1",
    "created_at": 0,
    "model": "m",
    "object": "response",
    "output": [
        {
            "id": "msg_1",
            "role": "assistant",
            "type": "message",
            "status": "completed",
            "content": [{"type": "output_text", "text": "4", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
ROW = {"responses_create_params": {"input": [{"role": "user", "content": "2+2?"}]}, "expected": "4"}


class SeedRequest(BaseSeedSessionRequest):
    start: int = 0


class SeedResponse(BaseSeedSessionResponse):
    started_at: int


class VerifyRequest(BaseVerifyRequest):
    expected: str


class VerifyResponse(BaseVerifyResponse):
    expected: str
    answer: str


class AddRequest(BaseSeedSessionRequest):
    amount: int


class Sums(SimpleResourcesServer):
    config: BaseResourcesServerConfig
    sums: dict[str, int] = Field(default_factory=dict)

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/add")(self.add)
        return app

    async def seed_session(self, request: Request, body: SeedRequest) -> SeedResponse:  # type: ignore[override]
        self.sums[request.session[SESSION_ID_KEY]] = body.start
        return SeedResponse(started_at=body.start)

    async def add(self, request: Request, body: AddRequest) -> dict[str, int]:
        self.sums[request.session[SESSION_ID_KEY]] += body.amount
        return {"sum": self.sums[request.session[SESSION_ID_KEY]]}

    async def verify(self, body: VerifyRequest) -> BaseVerifyResponse:  # type: ignore[override]
        answer = body.response.output[-1].content[0].text
        return VerifyResponse(**body.model_dump(), reward=float(answer == body.expected), answer=answer)

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        return {"tasks": len(tasks)}


def make(server: type[Any], config: type[Any], **fields: Any) -> Any:
    settings = config(host="", port=0, entrypoint="", name="it", **fields)
    return server(config=settings, server_client=MagicMock(spec=ServerClient))


@pytest.fixture
def sums() -> Any:
    return make(Sums, BaseResourcesServerConfig)


def test_health_answers_and_starts_no_session(sums: Any) -> None:
    with TestClient(sums.setup_webserver()) as client:
        response = client.get("/health")
    assert response.json() == {"status": "ok"}
    assert "set-cookie" not in response.headers


@pytest.mark.promise("one-worker-unchanged")
def test_a_session_lives_in_its_own_signed_cookie_and_has_no_owner_with_one_worker(sums: Any) -> None:
    app = sums.setup_webserver()
    with TestClient(app) as one, TestClient(app) as other:
        assert one.post("/seed_session", json={"start": 5}).json() == {"started_at": 5}
        assert other.post("/seed_session", json={}).json() == {"started_at": 0}
        assert list(one.cookies) == ["Sums___it"]
        assert one.post("/add", json={"amount": 2}).json() == {"sum": 7}
        assert other.post("/add", json={"amount": 2}).json() == {"sum": 2}
    assert len(sums.sums) == 2

    seen: dict[str, Any] = {}

    @app.post("/look")
    async def look(request: Request) -> None:
        seen.update(request.session)

    TestClient(app).post("/look")
    assert set(seen) == {SESSION_ID_KEY}
    assert SESSION_OWNER_KEY not in seen


@pytest.mark.promise("bad-input")
def test_a_forged_cookie_is_a_new_session(sums: Any) -> None:
    with TestClient(sums.setup_webserver()) as client:
        client.post("/seed_session", json={"start": 1})
        cookie = client.cookies["Sums___it"]
    forged = cookie[:-4] + ("AAAA" if not cookie.endswith("AAAA") else "BBBB")
    with TestClient(sums.setup_webserver(), headers={"Cookie": f"Sums___it={forged}"}) as client:
        assert client.post("/seed_session", json={"start": 2}).status_code == 200
    assert len(sums.sums) == 2


@pytest.mark.promise("secrets-rotate")
def test_a_session_outlives_a_change_of_the_secret() -> None:
    def served(secret: str | list[str]) -> TestClient:
        config = {SESSION_SECRET_KEY_NAME: secret, "head_server": {"host": "127.0.0.1", "port": 1}}
        sums = make(Sums, BaseResourcesServerConfig)
        sums.server_client = ServerClient.from_config(OmegaConf.create(config))
        app = sums.setup_webserver()

        @app.post("/which")
        async def which(request: Request) -> str:
            return str(request.session[SESSION_ID_KEY])

        return TestClient(app)

    old, new = "o" * 40, "n" * 40
    before = served(old)
    session = before.post("/which").json()
    headers = {"Cookie": f"Sums___it={before.cookies['Sums___it']}"}
    assert served([new, old]).post("/which", headers=headers).json() == session
    assert served(new).post("/which", headers=headers).json() != session


@pytest.mark.promise("secret-private")
def test_the_cookies_key_is_derived_from_the_secret(sums: Any) -> None:
    assert sums.session_keys() == [derive_session_key(session_secrets({})[0], "Sums___it")]


def test_verify_answers_all_fields_of_the_subclass(sums: Any) -> None:
    with TestClient(sums.setup_webserver()) as client:
        reply = client.post("/verify", json={**ROW, "response": RESPONSE}).json()
    assert (reply["reward"], reply["answer"], reply["expected"]) == (1.0, "4", "4")
    assert reply["response"]["output"][0]["content"][0]["text"] == "4"
    assert reply["responses_create_params"]["input"][0]["content"] == "2+2?"


def test_an_invalid_request_names_the_field_and_shortens_the_value(sums: Any, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(sums.setup_webserver()) as client:
        response = client.post("/add", json={"amount": "x" * 5000})
    assert response.status_code == 422
    (problem,) = response.json()["detail"]
    assert problem["loc"] == ["body", "amount"]
    assert len(response.content) < 500
    (record,) = [record for record in caplog.records if "invalid request" in record.getMessage()]
    assert "amount" in record.getMessage()
    assert len(record.getMessage()) < 500


def test_aggregate_metrics_sums_up_by_the_servers_own_metrics_too(sums: Any) -> None:
    results = [{"reward": 1.0, "_ng_task_index": 0}, {"reward": 0.0, "_ng_task_index": 1}]
    with TestClient(sums.setup_webserver()) as client:
        metrics = client.post("/aggregate_metrics", json={"verify_responses": results}).json()
    assert metrics["agent_metrics"]["mean/reward"] == 0.5
    assert metrics["agent_metrics"]["tasks"] == 2
    assert metrics["key_metrics"] == {"mean/reward": 0.5}
    assert len(metrics["group_level_metrics"]) == 2


def test_the_documentation_of_the_routes_can_be_read(sums: Any) -> None:
    with TestClient(sums.setup_webserver()) as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert {"/seed_session", "/verify", "/aggregate_metrics", "/add"} <= set(paths)
    assert "requestBody" in paths["/verify"]["post"]


@pytest.mark.promise("kinds-routed")
def test_which_servers_route_their_sessions() -> None:
    assert SimpleResourcesServer.routes_sessions
    assert SimpleResponsesAPIAgent.routes_sessions
    assert not SimpleResponsesAPIModel.routes_sessions


class EchoAgent(SimpleResponsesAPIAgent):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate(RESPONSE)

    async def run(self, response: Response, body: BaseRunRequest = Body()) -> BaseVerifyResponse:  # type: ignore[override]
        response.set_cookie("seen", "yes")
        reply = await self.responses(body.responses_create_params)
        return BaseVerifyResponse(responses_create_params=body.responses_create_params, response=reply, reward=0.5)


def test_an_agent_serves_responses_run_and_metrics() -> None:
    agent = make(EchoAgent, BaseResponsesAPIAgentConfig)
    with TestClient(agent.setup_webserver()) as client:
        assert client.post("/v1/responses", json={"input": "hi"}).json()["id"] == "resp_1"
        reply = client.post("/run", json=ROW)
        assert reply.json()["reward"] == 0.5
        assert reply.cookies["seen"] == "yes"
        metrics = client.post("/aggregate_metrics", json={"verify_responses": [{"reward": 0.25}]}).json()
    assert AggregateMetrics.model_validate(metrics).agent_metrics["mean/reward"] == 0.25


class EchoModel(SimpleResponsesAPIModel):
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        return NeMoGymResponse.model_validate({**RESPONSE, "model": body.model})

    async def chat_completions(
        self, body: NeMoGymChatCompletionCreateParamsNonStreaming = Body()
    ) -> NeMoGymChatCompletion:
        message = {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return NeMoGymChatCompletion.model_validate(
            {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )


def test_a_model_serves_both_apis() -> None:
    model = make(EchoModel, BaseResponsesAPIModelConfig)
    with TestClient(model.setup_webserver()) as client:
        assert client.post("/v1/responses", json={"input": "hi", "model": "big"}).json()["model"] == "big"
        messages = [{"role": "user", "content": "hi"}]
        reply = client.post("/v1/chat/completions", json={"messages": messages, "model": "m"}).json()
    assert reply["choices"][0]["message"]["content"] == "hi"


def test_free_keys_of_the_yaml_reach_the_config() -> None:
    model = make(EchoModel, BaseResponsesAPIModelConfig, my_setting=3)
    assert model.config.model_extra == {"my_setting": 3}


class PlainVerifier(SimpleResourcesServer):
    rewards: dict[str, float] = Field(default_factory=dict)
    _calls: int = PrivateAttr(default=0)

    def model_post_init(self, context: Any, /) -> None:
        self.rewards["4"] = 1.0

    def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:  # type: ignore[override]
        self._calls += 1
        return BaseVerifyResponse(**body.model_dump(), reward=self.rewards["4"])

    async def seed_session(self, body: BaseSeedSessionRequest) -> Any:
        return {"nested": [BaseSeedSessionResponse()]}


def test_handlers_may_be_plain_functions_and_answer_plain_values() -> None:
    server = make(PlainVerifier, BaseResourcesServerConfig)
    with TestClient(server.setup_webserver()) as client:
        assert client.post("/verify", json={**ROW, "response": RESPONSE}).json()["reward"] == 1.0
        assert client.post("/seed_session", json={}).json() == {"nested": [{}]}


def test_a_reward_that_is_no_number_is_an_error_and_not_an_empty_reward() -> None:
    server = make(PlainVerifier, BaseResourcesServerConfig)
    server.rewards["4"] = float("nan")
    with TestClient(server.setup_webserver()) as client:
        assert client.post("/verify", json={**ROW, "response": RESPONSE}).status_code == 500


def test_an_invalid_request_shows_no_secrets_and_not_all_of_its_problems(
    sums: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app = sums.setup_webserver()

    @app.post("/strict")
    async def strict(body: dict[str, int]) -> None: ...

    with TestClient(app) as client:
        one = client.post("/add", json={"api_key": "hunter2"})
        many = client.post("/strict", json={**{f"n{i}": "x" for i in range(5000)}, "password": "hunter2"})
        secret = client.post("/strict", json={"password": "hunter2"})
    assert [reply.status_code for reply in (one, many, secret)] == [422] * 3
    assert "hunter2" not in one.text + many.text + secret.text + caplog.text
    assert "more problems" in many.text
    assert max(len(record.getMessage()) for record in caplog.records) < 5000


def test_a_server_may_be_built_without_a_name() -> None:
    config = BaseResourcesServerConfig(host="", port=0, entrypoint="", name="")
    server = PlainVerifier(config=config, server_client=MagicMock(spec=ServerClient))
    with TestClient(server.setup_webserver()) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/openapi.json").json()["info"]["title"] == "PlainVerifier"


def test_start_and_stop_handlers_of_an_environment_run() -> None:
    app = make(PlainVerifier, BaseResourcesServerConfig).setup_webserver()
    seen: list[str] = []
    app.router.add_event_handler("startup", lambda: seen.append("startup"))
    app.router.add_event_handler("shutdown", lambda: seen.append("shutdown"))
    with TestClient(app):
        assert seen == ["startup"]
    assert seen == ["startup", "shutdown"]
