"""Starts the sandboxes of rows: from the row's image, with the repository at the base commit."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from nemo_gym.paths import state_dir
from nemo_gym.sandbox import (
    AsyncSandbox,
    SandboxResources,
    SandboxSpec,
    create_provider,
    resolve_provider_config,
    resolve_provider_metadata,
)
from resources_servers.swe_rebench.patches import Repository
from resources_servers.swe_rebench.repositories import IMAGE_PREFIX, build_images, sources_fingerprint
from resources_servers.swe_rebench.rows import SweRebenchRow

_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT: Final = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}

logger = logging.getLogger(__name__)


class Sandboxes:
    """Starts sandboxes, all from one provider.

    Where the provider is `local` and names no `images_dir`, the images are the example repositories, built on first
    use; and the server's own Python comes first on the path, so that rows may use it and its pytest.

    Args:
        provider: The provider's configuration.
        repository_dir: Where images have the repository; `{repository}` stands for its name. The sandbox's working
            directory when None.
        env: Variables of all commands.
        network: Whether they may reach a network.
        resources: Limits.
        start_timeout_s: How long a start may take.
    """

    def __init__(
        self,
        provider: str | Mapping[str, Any] | None = None,
        *,
        repository_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        network: bool = False,
        resources: SandboxResources | None = None,
        start_timeout_s: float = 600,
    ) -> None:
        config = resolve_provider_config(provider)
        self._env = {**_ENVIRONMENT, **(env or {})}
        self._examples: Path | None = None
        if config["type"] == "local":
            self._env.setdefault("PATH", f"{Path(sys.executable).parent}:{_SYSTEM_PATH}")
            if config.get("images_dir") is None:
                self._examples = state_dir() / "swe_rebench" / sources_fingerprint()
                config["images_dir"] = str(self._examples)
        self._metadata = resolve_provider_metadata(config)
        self._provider = create_provider(config)
        self._repository_dir = repository_dir
        self._network = network
        self._resources = resources or SandboxResources()
        self._start_timeout_s = start_timeout_s
        self._building = asyncio.Lock()
        self._built = False

    async def start(self, row: SweRebenchRow) -> Repository:
        """Start a sandbox for a row and prepare its repository; the caller stops it.

        Raises:
            SandboxError: It did not start.
            RepositoryError: Its repository can't be set to the base commit.
        """
        await self._build_examples(row.image_name)
        spec = SandboxSpec(
            image=row.image_name,
            env=self._env,
            network=self._network,
            resources=self._resources,
            start_timeout_s=self._start_timeout_s,
            metadata={**self._metadata, "instance_id": row.instance_id},
        )
        sandbox = AsyncSandbox(self._provider, spec)
        try:
            await sandbox.start()
            directory = sandbox.workdir
            if self._repository_dir is not None:
                directory = self._repository_dir.replace("{repository}", row.repository_name)
            return await Repository.prepare(sandbox, directory, row.base_commit)
        except BaseException:
            await sandbox.stop()
            raise

    @asynccontextmanager
    async def fresh(self, row: SweRebenchRow) -> AsyncIterator[Repository]:
        """Start a sandbox for a row, and stop it at the end."""
        repository = await self.start(row)
        try:
            yield repository
        finally:
            await repository.sandbox.stop()

    async def close(self) -> None:
        """Stop all sandboxes that still run."""
        await self._provider.close()

    async def _build_examples(self, image_name: str) -> None:
        if self._examples is None or self._built or not image_name.startswith(IMAGE_PREFIX):
            return
        async with self._building:
            if not self._built:
                await asyncio.to_thread(build_images, self._examples)
                self._built = True
