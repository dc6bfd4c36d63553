"""Sandboxes in containers of a Docker daemon, or of what speaks its Engine API.

Lifecycle: `DockerProvider.start` removes (once per process) what dead workers of this machine left, looks for the
image, creates a container and starts it (`nemo_gym/sandbox/docker/sandbox.py`). Every sandbox has its own connections
to the daemon, which end with it.

Failure policy: a start that fails for whatever reason is a `SandboxCreateError`, and its container is removed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import posixpath
import re
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym.errors import ConfigError, SandboxCreateError, SandboxError
from nemo_gym.sandbox.docker.commands import MAIN, SHELL
from nemo_gym.sandbox.docker.engine import Engine, EngineError, daemon_host
from nemo_gym.sandbox.docker.owners import labels, sweep
from nemo_gym.sandbox.docker.sandbox import DockerSandbox
from nemo_gym.sandbox.providers.base import SandboxProvider, stop_all
from nemo_gym.sandbox.spec import SandboxResources, SandboxSpec
from nemo_gym.sandbox.utils import cpu_cap_env, rewrite_image

logger = logging.getLogger(__name__)

DEFAULT_PROCESSES: Final = 512
OWN_PROCESSES: Final = 8
"""Processes of the container that are ours: its init, the main process, what starts a command."""
DEFAULT_WORKDIR: Final = "/workspace"
DEFAULT_SHM_BYTES: Final = 64 << 20
NOT_FOUND: Final = 404
_SWEPT: Final[set[str]] = set()
"""The daemons at which this process has looked for what dead workers left."""
_IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]*")


class DockerCreateConfig(BaseModel):
    """Settings of the docker provider: where the daemon is, and how it creates containers.

    Attributes:
        host: The daemon's address; `DOCKER_HOST`, else the usual socket, when None.
        image: The image where a sandbox's spec names none.
        image_rewrites: New beginnings of images' names by old ones, to name a mirror.
        pull: Whether the daemon fetches an image: `never`, when it is `missing`, or `always`.
        user: The user of the commands; the image's when None.
        network: The network of sandboxes that may have one.
        runtime: The daemon's OCI runtime, for example `runsc`; its default when None.
        init: Whether an init of the daemon's collects processes that have lost their parent.
        cap_drop: Capabilities that programs don't have, beside those that the daemon withholds.
        resources: Limits where a sandbox's own say nothing.
        timeout_s: Seconds that the daemon may take for an answer.
        metadata: Labels for `SandboxSpec.metadata`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = "docker"
    host: str | None = None
    image: str | None = None
    image_rewrites: dict[str, str] = {}
    pull: Literal["never", "missing", "always"] = "never"
    user: str | None = None
    network: str = "bridge"
    runtime: str | None = None
    init: bool = True
    cap_drop: tuple[str, ...] = ("AUDIT_WRITE", "MKNOD", "NET_RAW", "SETFCAP")
    resources: SandboxResources = SandboxResources()
    timeout_s: float = Field(default=30, gt=0)
    metadata: dict[str, str] = {}


class DockerProvider(SandboxProvider):
    """Starts sandboxes in containers. docs/sandboxes.md says what they are kept from, and what not."""

    name: ClassVar[str] = "docker"

    def __init__(self, config: Mapping[str, Any]) -> None:
        try:
            self.config = DockerCreateConfig.model_validate(dict(config))
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{first['msg']} (got {first['input']!r}); the docker sandbox provider knows the settings "
                f"{', '.join(DockerCreateConfig.model_fields)}",
                key=".".join(map(str, ("sandbox_provider", *first["loc"]))),
            ) from error
        self.host = daemon_host(self.config.host)
        self._running: set[DockerSandbox] = set()

    async def start(self, spec: SandboxSpec) -> DockerSandbox:
        """Start a sandbox (see `SandboxProvider.start`)."""
        engine = Engine(self.host, self.config.timeout_s)
        sandbox: DockerSandbox | None = None
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                image = self._image(spec)
                await engine.negotiate()
                await self._sweep_once(engine)
                own = await self._find_image(engine, image)
                workdir = posixpath.normpath(spec.workdir or (own if own != "/" else "") or DEFAULT_WORKDIR)
                name = f"nemo_gym-sandbox-{secrets.token_hex(8)}"
                is_own = own == workdir
                sandbox = DockerSandbox(engine, name, workdir, own_workdir=is_own, on_end=self._running.discard)
                self._running.add(sandbox)
                await sandbox.start(self._description(spec, image, name, workdir), spec.files)
        except BaseException as error:
            await (sandbox.stop() if sandbox is not None else engine.close())
            if isinstance(error, TimeoutError):
                raise SandboxCreateError(f"the sandbox did not start within {spec.start_timeout_s:g} s") from None
            if isinstance(error, SandboxError) and not isinstance(error, SandboxCreateError):
                raise SandboxCreateError(f"the sandbox did not start: {error}") from error
            raise
        return sandbox

    async def close(self) -> None:
        """Stop every sandbox that it started."""
        await stop_all(self._running)

    async def _sweep_once(self, engine: Engine) -> None:
        if self.host in _SWEPT:
            return
        _SWEPT.add(self.host)
        try:
            await sweep(engine)
        except EngineError as error:
            logger.warning("what earlier runs may have left can't be removed: %s", error)

    def _image(self, spec: SandboxSpec) -> str:
        image = spec.image or self.config.image
        if not image:
            raise SandboxCreateError("no image is named: set image of the sandbox's spec, or of the docker provider")
        image = rewrite_image(image, self.config.image_rewrites)
        if not _IMAGE.fullmatch(image) or ".." in image.split("/"):
            raise SandboxCreateError(f"{image!r} is no name of an image")
        return image

    async def _find_image(self, engine: Engine, image: str) -> str:
        """Return the working directory of the image, pulling it where that is wanted; "" when it has none."""
        if self.config.pull == "always":
            await _pull(engine, image)
        path = f"/images/{image}/json"
        try:
            found = await engine.call("GET", path)
        except EngineError as error:
            if error.status != NOT_FOUND:
                raise
            if self.config.pull == "never":
                raise SandboxCreateError(
                    f"{engine.where} has no image {image!r}: pull or build it, or set pull of the docker sandbox "
                    "provider to missing"
                ) from error
            await _pull(engine, image)
            found = await engine.call("GET", path)
        return str((found.get("Config") or {}).get("WorkingDir") or "")

    def _description(self, spec: SandboxSpec, image: str, name: str, workdir: str) -> dict[str, Any]:
        """Return the body of the call that creates the container."""
        limits = self.config.resources.model_dump() | spec.resources.model_dump(exclude_none=True)
        wanted = SandboxResources(**limits)
        env = {"NEMO_GYM_SANDBOX": name} | cpu_cap_env(wanted.cpu) | spec.env
        description = {
            "Image": image,
            "Hostname": "sandbox",
            "Entrypoint": [SHELL, "-c", MAIN],
            "Cmd": [],
            "WorkingDir": workdir,
            "Env": [f"{key}={value}" for key, value in env.items()],
            "Labels": self.config.metadata | spec.metadata | labels(),
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "OpenStdin": True,
            "StdinOnce": True,  # the end of the worker's connection is the end of the main process's input
            "Tty": False,
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": self._host_config(spec, wanted),
        }
        if self.config.user is not None:
            description["User"] = self.config.user
        return description

    def _host_config(self, spec: SandboxSpec, wanted: SandboxResources) -> dict[str, Any]:
        memory = (wanted.memory_mb or 0) << 20
        ulimits = [("core", 0, 0)]
        if wanted.file_size_mb:
            ulimits.append(("fsize", wanted.file_size_mb << 20, wanted.file_size_mb << 20))
        if wanted.cpu_time_s:
            ulimits.append(("cpu", wanted.cpu_time_s, wanted.cpu_time_s + 2))
        host: dict[str, Any] = {
            "AutoRemove": True,
            "Init": self.config.init,
            "NetworkMode": self.config.network if spec.network else "none",
            "SecurityOpt": ["no-new-privileges"],
            "CapDrop": list(self.config.cap_drop),
            "PidsLimit": (wanted.processes or DEFAULT_PROCESSES) + OWN_PROCESSES,
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": round((wanted.cpu or 0) * 1e9),
            "ShmSize": memory or DEFAULT_SHM_BYTES,
            "Ulimits": [{"Name": name, "Soft": soft, "Hard": hard} for name, soft, hard in ulimits],
            "LogConfig": {"Type": "none"},
        }
        if self.config.runtime is not None:
            host["Runtime"] = self.config.runtime
        return host


async def _pull(engine: Engine, image: str) -> None:
    """Have the daemon fetch an image; how long it may take is the start's limit."""
    name, colon, tag = image.rpartition(":")
    if "@" in image or not colon or "/" in tag:
        name, tag = image, "latest"
    params = {"fromImage": name} | ({} if "@" in image else {"tag": tag})
    logger.info("pulling the image %s", image)
    try:
        async with engine.opened("POST", "/images/create", params, patient=True) as response:
            async for line in response.content:
                progress = json.loads(line) if line.strip() else {}
                if "error" in progress:
                    raise SandboxCreateError(f"the image {image!r} can't be pulled: {progress['error']}")
    except EngineError as error:
        raise SandboxCreateError(f"the image {image!r} can't be pulled: {error}") from error
