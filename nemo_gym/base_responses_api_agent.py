"""The base of agent servers: the loop between a model and an environment's tools."""

from abc import abstractmethod
from typing import Any, ClassVar

from aiohttp import ClientResponse
from fastapi import Body as Body, FastAPI, Request

from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.config_types import (
    AggregateMetrics as AggregateMetrics,
    AggregateMetricsRequest as AggregateMetricsRequest,
    BaseRunServerInstanceConfig,
    ResourcesServerRef,
)
from nemo_gym.global_config import get_first_server_config_dict as get_first_server_config_dict
from nemo_gym.metrics import compute_aggregate_metrics
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server.base import SimpleServer, add_model_route
from nemo_gym.server.client import get_response_json, raise_for_status
from nemo_gym.server.session_end import (
    AgentSessionEndConfig,
    SessionEndReason as SessionEndReason,
    SessionEndRules,
)


class BaseResponsesAPIAgentConfig(BaseRunServerInstanceConfig):
    """The settings of an agent server.

    Attributes:
        session_end: When sessions end by themselves. With it, even empty, `on_session_end` is called; without it
            nothing is kept of sessions.
    """

    session_end: AgentSessionEndConfig | None = None


class SimpleResponsesAPIAgent(SimpleServer):
    """An agent server: subclass it and implement `responses` (the loop) and `run` (one whole rollout)."""

    routes_sessions: ClassVar[bool] = True
    session_last_path: ClassVar[str | None] = "/run"

    config: BaseResponsesAPIAgentConfig

    def setup_webserver(self) -> FastAPI:
        """Return the application; a subclass may add routes to it."""
        app = self.create_webserver()
        add_model_route(app, "/v1/responses", self.responses, NeMoGymResponse)
        add_model_route(app, "/run", self.run, BaseVerifyResponse)
        add_model_route(app, "/aggregate_metrics", self.aggregate_metrics, AggregateMetrics)
        return app

    def session_end_rules(self) -> SessionEndRules | None:
        """Return when sessions end, as the settings say; they begin with their first request."""
        settings = self.config.session_end
        if settings is None:
            return None
        return SessionEndRules(
            settings.idle_timeout_s, final_path="/run" if settings.after_run else None, begins_anywhere=True
        )

    @abstractmethod
    async def responses(self, body: NeMoGymResponseCreateParamsNonStreaming = Body()) -> NeMoGymResponse:
        """Answer a request by the loop between model and tools; `output` holds the whole trajectory."""

    @abstractmethod
    async def run(self, body: BaseRunRequest = Body()) -> BaseVerifyResponse:
        """Run one rollout: seed the resources server, answer the row's request, verify."""

    async def call_self(self, request: Request, url_path: str, **kwargs: Any) -> ClientResponse:
        """POST to a route of this agent within the session of `request`, however many workers the agent has.

        Args:
            request: The request being handled; its session may be a new one.
            url_path: The route, for example `/v1/responses`.
            **kwargs: As for `ServerClient.post`; `cookies` are sent beside the session's own.
        """
        cookies = {**kwargs.pop("cookies", {}), **self.session_cookies(request)}
        return await self.server_client.post(server_name=self.config.name, url_path=url_path, cookies=cookies, **kwargs)

    async def aggregate_metrics(self, body: AggregateMetricsRequest = Body()) -> AggregateMetrics:
        """Sum up the results of many rollouts: the resources server does, where the agent has one."""
        resources_server = getattr(self.config, "resources_server", None)
        if not isinstance(resources_server, ResourcesServerRef):
            return compute_aggregate_metrics(body.verify_responses)
        response = await self.server_client.post(
            server_name=resources_server.name, url_path="/aggregate_metrics", json=body
        )
        await raise_for_status(response)
        return AggregateMetrics.model_validate(await get_response_json(response))
