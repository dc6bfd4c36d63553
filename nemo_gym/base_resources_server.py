"""The base of resources servers: a task's tools, its state per session, and its verifier.

Lifecycle of a session: `POST /seed_session` begins it and sets the session cookie, tool calls carry that cookie,
`POST /verify` scores the outcome.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Iterable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import FastAPI
from pydantic import AfterValidator, BaseModel, Field

from nemo_gym.config_types import (
    AggregateMetrics as AggregateMetrics,
    AggregateMetricsRequest as AggregateMetricsRequest,
    BaseRunServerInstanceConfig,
)
from nemo_gym.mcp_auto_exposure import (
    TOKEN_HEADER as NEMO_GYM_MCP_SESSION_TOKEN_HEADER,
    CatchAll,
    MCPTool,
    maybe_auto_expose,
    session_token_serializer,
)
from nemo_gym.mcp_auto_exposure.hosts import checked_host, checked_origin
from nemo_gym.mcp_auto_exposure.session_replies import REPLY_KEY
from nemo_gym.metrics import compute_aggregate_metrics
from nemo_gym.server.base import SimpleServer, add_model_route
from nemo_gym.server.session_end import (
    ResourcesSessionEndConfig,
    SessionEndReason as SessionEndReason,
    SessionEndRules,
)
from nemo_gym.tool_names import is_tool_name as is_tool_name
from nemo_gym.wire.responses import (
    NeMoGymResponse as NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming as NeMoGymResponseCreateParamsNonStreaming,
)

NEMO_GYM_MCP_METADATA_KEY: Final = REPLY_KEY


class BaseResourcesServerConfig(BaseRunServerInstanceConfig):
    """The settings of a resources server.

    Attributes:
        expose_tools_over_mcp: Whether the tool routes are also served over the Model Context Protocol, at `/mcp`.
        mcp_allowed_hosts: Names under which clients may address `/mcp`, as in the `Host` header, for example
            `host.docker.internal`; with a port only that port. IP addresses, `localhost`, the configured `host` and
            this machine's own name need no entry; "*" allows every name.
        mcp_allowed_origins: Web pages that may call `/mcp`, as in the `Origin` header, for example
            `https://inspector.example`. The server's own origin and those of this machine need no entry.
        mcp_lost_session: How a request of a lost session is answered at `/mcp`: "http" with the plain 410, "jsonrpc"
            with a JSON-RPC error of the same text.
        session_end: When sessions end by themselves. With it, even empty, `on_session_end` is called; without it
            nothing is kept of sessions.
    """

    expose_tools_over_mcp: bool = False
    mcp_allowed_hosts: list[Annotated[str, AfterValidator(checked_host)]] = Field(default_factory=list)
    mcp_allowed_origins: list[Annotated[str, AfterValidator(checked_origin)]] = Field(default_factory=list)
    mcp_lost_session: Literal["http", "jsonrpc"] = "http"
    session_end: ResourcesSessionEndConfig | None = None


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
    session_first_path: ClassVar[str | None] = "/seed_session"
    session_last_path: ClassVar[str | None] = "/verify"

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """Return the application; a subclass calls this and adds its tool routes to it."""
        app = self.create_webserver()
        add_model_route(app, "/seed_session", self.seed_session, BaseSeedSessionResponse)
        add_model_route(app, "/verify", self.verify, BaseVerifyResponse)
        add_model_route(app, "/aggregate_metrics", self.aggregate_metrics, AggregateMetrics)
        return app

    def expose(self, app: FastAPI) -> None:
        """Serve the tool routes over MCP as well, where the settings say so."""
        maybe_auto_expose(self, app)

    def session_routing_options(self) -> dict[str, Any]:
        """Return what session routing needs to read MCP session tokens."""
        return {
            **super().session_routing_options(),
            "mcp_token_header": NEMO_GYM_MCP_SESSION_TOKEN_HEADER,
            "mcp_token_serializer": session_token_serializer(self),
            "mcp_errors_as_jsonrpc": self.config.mcp_lost_session == "jsonrpc",
        }

    def session_end_rules(self) -> SessionEndRules | None:
        """Return when sessions end, as the settings say; they begin with `/seed_session`."""
        settings = self.config.session_end
        if settings is None:
            return None
        return SessionEndRules(settings.idle_timeout_s, final_path="/verify" if settings.after_verify else None)

    def mcp_tools(self, harvested: list[MCPTool], catchall: CatchAll | None) -> Iterable[MCPTool]:
        """Return the tools to serve over MCP; override it to leave some out or to add others.

        It is asked once, when the server starts.

        Args:
            harvested: The tools read from the server's plain `POST /<tool>` routes.
            catchall: The server's one route for all tools, such as `POST /{name}`, if it has one: its tools come
                from data, so they have to be made here, with `catchall.tool(name, description, input_schema)`.
        """
        return harvested

    def mcp_allowed_tools_for_session(
        self, seed_body: dict[str, Any]
    ) -> Iterable[str] | Awaitable[Iterable[str] | None] | None:
        """Return the names of the tools that a new session may use over MCP; None for all of them. It may be `async`.

        Args:
            seed_body: The body of the session's `/seed_session` request, as parsed JSON.
        """
        return None

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
