"""Typed configuration: servers, references between them, datasets, and the metrics that travel between servers.

The classes named `...Config` and `...Ref` are what a server's own config class is built from. Keys they don't
declare are kept in `model_extra`, so that an environment may read settings of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from omegaconf import OmegaConf as OmegaConf
from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.paths import COMPONENT_KINDS

ServerKind: TypeAlias = Literal["resources_servers", "responses_api_agents", "responses_api_models"]

SERVER_KINDS: Final[tuple[ServerKind, ...]] = get_args(ServerKind)
if SERVER_KINDS != COMPONENT_KINDS:
    raise AssertionError("ServerKind and paths.COMPONENT_KINDS must list the same kinds")

DatasetType: TypeAlias = Literal["example", "train", "validation"]

DATASET_TYPES: Final[tuple[DatasetType, ...]] = get_args(DatasetType)

SessionPlacement: TypeAlias = Literal["least_loaded", "local"]

SESSION_PLACEMENTS: Final[tuple[SessionPlacement, ...]] = get_args(SessionPlacement)

SessionHop: TypeAlias = Literal["frames", "aiohttp"]

SESSION_HOPS: Final[tuple[SessionHop, ...]] = get_args(SessionHop)

DEFAULT_HOST: Final = "127.0.0.1"

_ANY_ADDRESS: Final = {"": DEFAULT_HOST, "0.0.0.0": DEFAULT_HOST, "::": "::1"}  # noqa: S104


class Domain(StrEnum):
    """What an environment trains; for people who choose among environments."""

    MATH = "math"
    CODING = "coding"
    AGENT = "agent"
    KNOWLEDGE = "knowledge"
    INSTRUCTION_FOLLOWING = "instruction_following"
    LONG_CONTEXT = "long_context"
    SAFETY = "safety"
    GAMES = "games"
    TRANSLATION = "translation"
    E2E = "e2e"
    RLHF = "rlhf"
    OTHER = "other"


class DatasetConfig(BaseModel):
    """One JSONL file of tasks that belongs to a server.

    Args:
        name: The dataset's name, for people.
        type: `example` (a few rows, committed beside the server), `train` or `validation`.
        jsonl_fpath: The file; a relative path is looked for as components are, see `nemo_gym.paths.find_file`.
        num_repeats: How many rollouts each row gets.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    type: DatasetType
    jsonl_fpath: str
    num_repeats: int = Field(default=1, ge=1)


class BaseServerConfig(BaseModel):
    """Where a server listens.

    Args:
        host: The address to bind.
        port: The TCP port.
        num_workers: How many worker processes serve it; None means one.
    """

    model_config = ConfigDict(extra="allow")

    host: str
    port: int
    num_workers: int | None = None


class BaseRunServerConfig(BaseServerConfig):
    """A server that the framework starts.

    Args:
        entrypoint: The Python file to run, relative to the implementation's folder.
        domain: What the environment trains; a domain of one's own is a plain text.
        verified: Whether training on this environment has been shown to work.
        description: One sentence for people.
        datasets: The tasks that belong to the server.
        shutdown_grace_s: Seconds that requests in flight get to finish when the server is asked to stop.
        worker_health_timeout_s: Seconds without a sign of life after which a worker is replaced, and its sessions
            are lost; with one worker it means nothing. A handler that holds the interpreter gives no sign.
        session_placement: Which of several workers a new session begins at: the `least_loaded` one, or always the
            one that accepted its first request (`local`).
        session_hop: How one worker forwards a request to another: in `frames`, or as HTTP by `aiohttp`.
        figures: Whether the workers count what they do, for `gym env status`, `/workers` and `/metrics`.
        expose_figures: Whether `/workers` and `/metrics` are answered at the server's port; None answers them where
            the host is a loopback address.
    """

    entrypoint: str
    domain: Domain | str | None = Field(default=None, union_mode="left_to_right")
    verified: bool = False
    description: str | None = None
    datasets: list[DatasetConfig] | None = None
    shutdown_grace_s: int = Field(default=10, ge=0)
    worker_health_timeout_s: int = Field(default=60, ge=1)
    session_placement: SessionPlacement = "least_loaded"
    session_hop: SessionHop = "frames"
    figures: bool = True
    expose_figures: bool | None = None


class BaseRunServerInstanceConfig(BaseRunServerConfig):
    """A server that has a name in the configuration.

    Args:
        name: The instance's name, by which other servers call it.
    """

    name: str


class ResourcesServerRef(BaseModel):
    """A reference to a resources server instance."""

    type: Literal["resources_servers"]
    name: str


class AgentServerRef(BaseModel):
    """A reference to an agent server instance."""

    type: Literal["responses_api_agents"]
    name: str


class ModelServerRef(BaseModel):
    """A reference to a model server instance."""

    type: Literal["responses_api_models"]
    name: str


ServerRef: TypeAlias = Annotated[ResourcesServerRef | AgentServerRef | ModelServerRef, Field(discriminator="type")]


class AggregateMetricsRequest(BaseModel):
    """The results of many rollouts of one server, to be summed up.

    Args:
        verify_responses: The replies of `/verify` with their task and rollout indices, one per rollout.
    """

    verify_responses: list[dict[str, Any]]


class AggregateMetrics(BaseModel):
    """The summary of many rollouts.

    Args:
        group_level_metrics: One mapping per task.
        agent_metrics: Numbers over all tasks.
        key_metrics: The few numbers of `agent_metrics` to look at first.
    """

    model_config = ConfigDict(extra="allow")

    group_level_metrics: list[dict[str, Any]] = Field(default_factory=list)
    agent_metrics: dict[str, Any] = Field(default_factory=dict)
    key_metrics: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ServerInstance:
    """A server of the resolved configuration, ready to be started.

    Args:
        name: The instance's name: its key at the top of the configuration.
        kind: Which of the three kinds of server it is.
        implementation: The name of the implementation's folder.
        entrypoint: The Python file to run, relative to `folder`.
        host: The address it binds.
        port: The TCP port.
        num_workers: The number of worker processes, at least 1.
        folder: The implementation's folder.
        settings: Everything the configuration says about it, resolved; with host, port and num_workers.
    """

    name: str
    kind: ServerKind
    implementation: str
    entrypoint: str
    host: str
    port: int
    num_workers: int
    folder: Path
    settings: dict[str, Any]

    @property
    def url(self) -> str:
        """The address to call it at, without a trailing slash; loopback where it binds every address."""
        return server_url(self.host, self.port)


def server_url(host: str, port: int) -> str:
    """Return the http URL of a server that binds `host` and `port`; loopback where it binds every address.

    IPv6 addresses are put in brackets (RFC 3986 section 3.2.2).
    """
    host = _ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
