"""The base of resources servers: a task's tools, its state per session, and its verifier.

Lifecycle of a session: `POST /seed_session` begins it and sets the session cookie, tool calls carry that cookie,
`POST /verify` scores the outcome.
"""

import re
from abc import abstractmethod
from enum import StrEnum
from typing import Any, ClassVar, Final

from fastapi import FastAPI
from pydantic import BaseModel, Field

from nemo_gym.config_types import (
    AggregateMetrics as AggregateMetrics,
    AggregateMetricsRequest as AggregateMetricsRequest,
    BaseRunServerInstanceConfig,
)
from nemo_gym.metrics import compute_aggregate_metrics
from nemo_gym.openai_utils import (
    NeMoGymResponse as NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming as NeMoGymResponseCreateParamsNonStreaming,
)
from nemo_gym.server.base import SimpleServer, add_model_route

# A tool's name becomes the path of a URL, so it must be one plain segment, and none of the framework's own routes.
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_FRAMEWORK_ROUTES: Final = frozenset({"seed_session", "verify", "aggregate_metrics", "close_session", "health", "mcp"})


def is_tool_name(name: str) -> bool:
    """Return whether `POST /<name>` can be a tool's route."""
    return bool(_TOOL_NAME.fullmatch(name)) and name not in _FRAMEWORK_ROUTES


class BaseResourcesServerConfig(BaseRunServerInstanceConfig):
    """The settings of a resources server.

    Attributes:
        expose_tools_over_mcp: Whether the tool routes are also served over the Model Context Protocol.
    """

    expose_tools_over_mcp: bool = False


class BaseRunRequest(BaseModel):
    """One rollout to run: a dataset row. Environments add the fields of their rows.

    Attributes:
        responses_create_params: The request that starts the conversation with the model.
    """

    responses_create_params: NeMoGymResponseCreateParamsNonStreaming


class BaseVerifyRequest(BaseRunRequest):
    """A finished rollout to be scored.

    Attributes:
        response: The agent's whole trajectory: everything the model and the tools said, in `output`.
    """

    response: NeMoGymResponse


class BaseVerifyResponse(BaseVerifyRequest):
    """A scored rollout.

    Attributes:
        reward: The score, a finite number; 1.0 for full success in most environments.
    """

    reward: float = Field(allow_inf_nan=False)


class BaseSeedSessionRequest(BaseModel):
    """What a new session starts from; environments add the fields of their rows that they need."""


class BaseSeedSessionResponse(BaseModel):
    """The reply to a new session; environments may add fields."""


class ReverifyMode(StrEnum):
    """Whether a stored rollout can be scored again by `/verify` alone.

    STATELESS: yes, the verdict depends on the request only. STATEFUL: no, it needs the session's own state.
    """

    STATELESS = "stateless"
    STATEFUL = "stateful"


class SimpleResourcesServer(SimpleServer):
    """A resources server: subclass it, implement `verify`, and add a `POST` route per tool.

    Handlers may take a leading `request: Request` and find the session's id in `request.session[SESSION_ID_KEY]`.
    """

    routes_sessions: ClassVar[bool] = True

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """Return the application; a subclass calls this and adds its tool routes to it."""
        app = self.create_webserver()
        add_model_route(app, "/seed_session", self.seed_session, BaseSeedSessionResponse)
        add_model_route(app, "/verify", self.verify, BaseVerifyResponse)
        add_model_route(app, "/aggregate_metrics", self.aggregate_metrics, AggregateMetrics)
        return app

    async def seed_session(self, body: BaseSeedSessionRequest) -> BaseSeedSessionResponse:
        """Begin a session. Override it to set up the session's state."""
        return BaseSeedSessionResponse()

    @abstractmethod
    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        """Score a finished rollout."""

    async def aggregate_metrics(self, body: AggregateMetricsRequest) -> AggregateMetrics:
        """Sum up the results of many rollouts, by `compute_metrics` and `get_key_metrics`."""
        return compute_aggregate_metrics(body.verify_responses, self.compute_metrics, self.get_key_metrics)

    def compute_metrics(self, tasks: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Return the environment's own metrics, beside the statistics that every environment gets.

        Args:
            tasks: Per task, the verify responses of its rollouts.
        """
        return {}

    def get_key_metrics(self, agent_metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the few of `agent_metrics` to look at first: the mean reward, unless overridden."""
        return {key: agent_metrics[key] for key in ("mean/reward",) if key in agent_metrics}
