"""Sandboxes on this machine: a private folder and a supervised tree of processes, in bubblewrap where that works.

Lifecycle: `LocalProvider.start` makes a locked folder and starts its guard (`process_supervisor.py`), which starts the
server that answers requests. `stop` closes the worker's direction of the control socket; the guard kills, removes the
folder and exits, which the worker sees as the end of the socket's other direction. A worker that dies closes it too.

Failure policy: a guard or server that dies or hangs takes the sandbox with it: what is left is removed here, requests
in flight raise `SandboxStoppedError`, and the status is "failed".
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nemo_gym.errors import ConfigError, SandboxCreateError
from nemo_gym.paths import component_roots
from nemo_gym.sandbox.folders import default_root, prepare_root, sweep_once
from nemo_gym.sandbox.isolation import INSIDE_WORKDIR, Bubblewrap, find_bubblewrap
from nemo_gym.sandbox.local_sandbox import Launch, LocalSandbox
from nemo_gym.sandbox.providers.base import SandboxProvider, stop_all
from nemo_gym.sandbox.spec import SandboxResources, SandboxSpec

DEFAULT_PROCESSES: Final = 512


class LocalProviderConfig(BaseModel):
    """Settings of the local provider.

    Attributes:
        images_dir: The folder whose folders are the images; looked for like a component when relative.
        root_dir: Where the sandboxes' folders are made; one per user in the folder for temporary files when None.
        isolation: `bubblewrap` insists on it, `none` goes without, `auto` uses it where it works.
        visible_paths: Paths of this machine that programs in bubblewrap may read, beside the system's own and Python's.
        resources: Limits where a sandbox's own say nothing.
        metadata: Labels for `SandboxSpec.metadata`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str = "local"
    images_dir: Path | None = None
    root_dir: Path | None = None
    isolation: Literal["auto", "bubblewrap", "none"] = "auto"
    visible_paths: tuple[Path, ...] = ()
    resources: SandboxResources = SandboxResources()
    metadata: dict[str, str] = {}


class LocalProvider(SandboxProvider):
    """Starts sandboxes on this machine. docs/sandboxes.md says what they are kept from, and what not."""

    name: ClassVar[str] = "local"

    def __init__(self, config: Mapping[str, Any]) -> None:
        try:
            self.config = LocalProviderConfig.model_validate(dict(config))
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{first['msg']} (got {first['input']!r}); the local sandbox provider knows the settings "
                f"{', '.join(LocalProviderConfig.model_fields)}",
                key=".".join(map(str, ("sandbox_provider", *first["loc"]))),
            ) from error
        self._running: set[LocalSandbox] = set()

    async def start(self, spec: SandboxSpec) -> LocalSandbox:
        """Start a sandbox (see `SandboxProvider.start`)."""
        try:
            launch = await asyncio.to_thread(self._plan, spec)
            sandbox = LocalSandbox(launch, on_end=self._running.discard)
        except OSError as error:
            raise SandboxCreateError(f"this process has no room for another sandbox: {error}") from error
        self._running.add(sandbox)
        try:
            async with asyncio.timeout(spec.start_timeout_s):
                await sandbox.start(spec.files)
        except TimeoutError:
            await sandbox.stop()
            raise SandboxCreateError(f"the sandbox did not start within {spec.start_timeout_s:g} s") from None
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def close(self) -> None:
        """Stop every sandbox that it started."""
        await stop_all(self._running)

    def _plan(self, spec: SandboxSpec) -> Launch:
        """Return how to start a sandbox: everything that has to look at the machine first. Blocks."""
        root = prepare_root(self.config.root_dir or default_root())
        sweep_once(root)
        return Launch(
            root=root,
            image=self._image(spec.image),
            bubblewrap=self._bubblewrap(),
            workdir=spec.workdir or INSIDE_WORKDIR,
            env=spec.env,
            network=spec.network,
            visible=tuple(path for path in self.config.visible_paths if path.exists()),
            resources=self._resources(spec.resources),
        )

    def _bubblewrap(self) -> Bubblewrap | None:
        if self.config.isolation == "none":
            return None
        found = find_bubblewrap()
        if isinstance(found, Bubblewrap):
            return found
        if self.config.isolation == "bubblewrap":
            raise SandboxCreateError(f"{found}; install it, or set isolation of the local sandbox provider to auto")
        return None

    def _image(self, image: str | None) -> Path | None:
        if image is None:
            return None
        folder = self.config.images_dir
        if folder is None:
            raise SandboxCreateError(f"the image {image!r} needs images_dir of the local sandbox provider")
        candidates = [folder] if folder.is_absolute() else [root / folder for root in component_roots()]
        if not image or Path(image).is_absolute() or ".." in Path(image).parts:
            raise SandboxCreateError(f"the image {image!r} is no name of a folder below {folder}")
        for candidate in candidates:
            path = candidate / image
            if path.is_dir():
                if not os.access(path, os.R_OK | os.X_OK):
                    raise SandboxCreateError(f"the image {image!r} can't be read: {path}")
                return path.resolve()
        raise SandboxCreateError(f"there is no image {image!r}: no folder {' or '.join(map(str, candidates))}/{image}")

    def _resources(self, wanted: SandboxResources) -> SandboxResources:
        merged = SandboxResources(processes=DEFAULT_PROCESSES).model_dump()
        for limits in (self.config.resources, wanted):
            merged |= limits.model_dump(exclude_none=True)
        return SandboxResources(**merged)
