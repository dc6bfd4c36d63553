"""Repairing real repositories: each session has a sandbox with a repository, and tests decide about what was done.

`POST /seed_session` starts the row's sandbox at the base commit; the tools work in it; `POST /verify` takes it, reads
the agent's changes out of it, stops it, and judges them in a fresh one. A session without a sandbox is answered 410.

`POST /verify` answers a reward only when something was found out about the agent's work. What could not be judged is
a 503 with the reason: collection records a failure and may run the row again, and no rollout counts as 0 for it.

Every sandbox is stopped: by `/verify`, by a second seed, by the session's end (closed, or idle for too long, where
`session_end` is configured), and all of them when the worker stops.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from pydantic import ConfigDict, Field, PrivateAttr

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SessionEndReason,
    SimpleResourcesServer,
)
from nemo_gym.sandbox import (
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxHandle,
    SandboxResources,
    SandboxStoppedError,
)
from nemo_gym.server_utils import SESSION_ID_KEY, is_nemo_gym_fastapi_entrypoint
from resources_servers.swe_rebench import tools
from resources_servers.swe_rebench.judge import Judge, JudgeSettings, Verdict
from resources_servers.swe_rebench.patch_paths import is_test_setup, patch_paths
from resources_servers.swe_rebench.patches import OwnedFilesError, PatchTooLargeError, Repository, RepositoryError
from resources_servers.swe_rebench.rows import SweRebenchRow
from resources_servers.swe_rebench.sandboxes import Sandboxes


class SweRebenchResourcesServerConfig(BaseResourcesServerConfig):
    """The settings of the server. Limits on numbers are those of one worker.

    Attributes:
        sandbox_provider: Where sandboxes come from: a provider's name, or its settings with the key `type`.
        repository_dir: Where images have the repository; `{repository}` stands for the last part of the row's `repo`.
            The sandbox's working directory when None.
        sandbox_env: Variables of all commands in sandboxes.
        sandbox_network: Whether they may reach a network.
        sandbox_resources: Their limits.
        sandbox_start_timeout_s: How long the start of one may take.
        max_sandboxes: How many sessions may have a sandbox at one time.
        sandbox_wait_s: How long a seed waits for one of them to end; then it is answered 503.
        max_judgings: How many patches are judged at one time. Each needs one sandbox more.
        command_timeout_s: How long a command of the agent may take that sets no time itself.
        max_command_timeout_s: The longest time it may set.
        max_command_output_bytes: How much of a command's output it sees, of each stream.
        max_read_chars: How much of a file it sees at once.
        max_patch_bytes: The largest patch; a larger one is judged 0.
        install_timeout_s: How long a row's installation may take.
        test_timeout_s: How long its tests may take.
        max_log_bytes: How much of the tests' output is read; beyond it the middle is missing.
        judging_attempts: In how many fresh sandboxes a patch that can't be judged is tried.
        is_verifying_golden_patch: Whether `/verify` judges the row's own patch instead of the agent's work.
    """

    sandbox_provider: str | dict[str, Any] | None = None
    repository_dir: str | None = None
    sandbox_env: dict[str, str] = Field(default_factory=dict)
    sandbox_network: bool = False
    sandbox_resources: SandboxResources = Field(default_factory=SandboxResources)
    sandbox_start_timeout_s: float = Field(default=600, gt=0)
    max_sandboxes: int = Field(default=64, ge=1)
    sandbox_wait_s: float = Field(default=600, gt=0)
    max_judgings: int = Field(default=2, ge=1)
    command_timeout_s: float = Field(default=120, gt=0)
    max_command_timeout_s: float = Field(default=1800, gt=0)
    max_command_output_bytes: int = Field(default=50_000, ge=1)
    max_read_chars: int = Field(default=100_000, ge=1)
    max_patch_bytes: int = Field(default=20_000_000, ge=1)
    install_timeout_s: float = Field(default=1800, gt=0)
    test_timeout_s: float = Field(default=1800, gt=0)
    max_log_bytes: int = Field(default=10_000_000, ge=1)
    judging_attempts: int = Field(default=2, ge=1)
    is_verifying_golden_patch: bool = False


class SweRebenchSeedSessionRequest(SweRebenchRow, BaseSeedSessionRequest):
    """The task; its solution and its tests stay with the server."""


class SweRebenchSeedSessionResponse(BaseSeedSessionResponse):
    """The session's sandbox.

    Attributes:
        handle: Its name.
        workdir: Where the repository is in it.
        tools: The tools, for agents that offer them to a model by themselves.
    """

    handle: SandboxHandle
    workdir: str
    tools: list[dict[str, Any]]


class SweRebenchVerifyRequest(SweRebenchRow, BaseVerifyRequest):
    """A finished rollout; other fields of the row are handed through."""

    model_config = ConfigDict(extra="allow")


class SweRebenchVerifyResponse(Verdict, SweRebenchVerifyRequest, BaseVerifyResponse):
    """The verdict.

    Attributes:
        model_patch: The agent's changes, as judged; None where the row's own patch was.
        patch_files: The files that they are about.
        touches_test_setup: Those of them that say how tests are run, such as `conftest.py`; they may fake results.
    """

    model_patch: str | None = None
    patch_files: list[str] = Field(default_factory=list)
    touches_test_setup: list[str] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Session:
    """What a session has between its seed and its verification.

    Args:
        instance_id: The row that it was seeded with.
        digest: That row's hash.
        repository: The sandbox's repository.
        writing: Held while a tool changes a file, as one that edits reads it first.
    """

    instance_id: str
    digest: str
    repository: Repository
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Work:
    """What an agent did, after its sandbox is gone.

    Args:
        instance_id: The row that the session was seeded with.
        digest: That row's hash.
        patch: The changes.
        baseline: The tree that they were made from.
        extract_s: How long it took to read them.
    """

    instance_id: str
    digest: str
    patch: bytes
    baseline: str
    extract_s: float


class SweRebenchResourcesServer(SimpleResourcesServer):
    """Serves repositories to repair."""

    config: SweRebenchResourcesServerConfig

    _sessions: dict[str, Session] = PrivateAttr(default_factory=dict)
    _unjudged: dict[str, Work] = PrivateAttr(default_factory=dict)
    _sandboxes: Sandboxes = PrivateAttr()
    _judge: Judge = PrivateAttr()
    _free_sandboxes: asyncio.Semaphore = PrivateAttr()
    _free_judgings: asyncio.Semaphore = PrivateAttr()

    def setup_webserver(self) -> FastAPI:
        """Return the application with the tools."""
        config = self.config
        self._sandboxes = Sandboxes(
            config.sandbox_provider,
            repository_dir=config.repository_dir,
            env=config.sandbox_env,
            network=config.sandbox_network,
            resources=config.sandbox_resources,
            start_timeout_s=config.sandbox_start_timeout_s,
        )
        settings = JudgeSettings(
            install_timeout_s=config.install_timeout_s,
            test_timeout_s=config.test_timeout_s,
            attempts=config.judging_attempts,
            max_log_bytes=config.max_log_bytes,
        )
        self._judge = Judge(self._sandboxes.fresh, settings)
        self._free_sandboxes = asyncio.Semaphore(config.max_sandboxes)
        self._free_judgings = asyncio.Semaphore(config.max_judgings)
        app = super().setup_webserver()
        app.router.lifespan_context = self._stopping_sandboxes(app.router.lifespan_context)
        for tool in (self.run_command, self.read_file, self.write_file, self.edit_file, self.list_files):
            app.post(f"/{tool.__name__}")(tool)
        return app

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: SweRebenchSeedSessionRequest
    ) -> SweRebenchSeedSessionResponse:
        """Start the row's sandbox; a second seed takes a new one in place of the session's first."""
        session_id = request.session[SESSION_ID_KEY]
        await self.release(session_id)
        try:
            async with asyncio.timeout(self.config.sandbox_wait_s):
                await self._free_sandboxes.acquire()
        except TimeoutError:
            detail = f"all {self.config.max_sandboxes} sandboxes of this worker are in use; try again later"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail) from None
        try:
            with _no_reward_for_trouble(body.instance_id):
                repository = await self._sandboxes.start(body)
        except RepositoryError as error:
            self._free_sandboxes.release()
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{body.instance_id}: {error}") from error
        except BaseException:
            self._free_sandboxes.release()
            raise
        # Another seed of this session may have come meanwhile. Nothing is awaited before the sandbox has its place.
        other = self._sessions.get(session_id)
        self._sessions[session_id] = Session(body.instance_id, body.digest, repository)
        if other is not None:
            await self._stop(other)
        return SweRebenchSeedSessionResponse(
            handle=repository.sandbox.handle, workdir=repository.directory, tools=tools.TOOLS
        )

    async def run_command(self, request: Request, body: tools.RunCommandRequest) -> tools.RunCommandResponse:
        """Run a shell command in the repository and read what it prints."""
        config = self.config
        timeout_s = min(body.timeout_s or config.command_timeout_s, config.max_command_timeout_s)
        with _told():
            return await tools.run_command(
                self._session_of(request).repository,
                body,
                timeout_s=timeout_s,
                max_output_bytes=config.max_command_output_bytes,
            )

    async def read_file(self, request: Request, body: tools.ReadFileRequest) -> tools.ReadFileResponse:
        """Read a file, or some of its lines."""
        with _told():
            return await tools.read_file(
                self._session_of(request).repository, body, max_chars=self.config.max_read_chars
            )

    async def write_file(self, request: Request, body: tools.WriteFileRequest) -> tools.DoneResponse:
        """Write a file: make it, or replace all it holds."""
        session = self._session_of(request)
        with _told():
            async with session.writing:
                return await tools.write_file(session.repository, body)

    async def edit_file(self, request: Request, body: tools.EditFileRequest) -> tools.DoneResponse:
        """Replace a text in a file. The old text has to be there exactly once."""
        session = self._session_of(request)
        with _told():
            async with session.writing:
                return await tools.edit_file(session.repository, body)

    async def list_files(self, request: Request, body: tools.ListFilesRequest) -> tools.ListFilesResponse:
        """List the files of the repository, or of one folder."""
        with _told():
            return await tools.list_files(self._session_of(request).repository, body)

    async def verify(  # type: ignore[override]
        self, request: Request, body: SweRebenchVerifyRequest
    ) -> SweRebenchVerifyResponse:
        """Judge what the agent left, and end its sandbox. Reward 1.0 if all tests that have to pass do.

        What could not be judged is kept until the session is over, and judged when this is asked for again.
        """
        patch = None
        session_id = request.session[SESSION_ID_KEY]
        if self.config.is_verifying_golden_patch:
            await self.release(session_id)
            async with self._free_judgings:
                verdict = await self._judge.judge_reference(body)
        else:
            patch, verdict = await self._judge_work(session_id, body)
        if not verdict.evaluation_completed:
            detail = f"{body.instance_id} could not be judged (attempts: {verdict.attempts}): {verdict.reason}"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail)
        files = sorted(path.decode("utf-8", "replace") for path in patch_paths(patch or b""))
        found = {
            "reward": 1.0 if verdict.resolved else 0.0,
            "model_patch": None if patch is None else patch.decode("utf-8", "replace"),
            "patch_files": files,
            "touches_test_setup": [path for path in files if is_test_setup(path)],
        }
        return SweRebenchVerifyResponse(**{**dict(body), **dict(verdict), **found})

    async def on_session_end(self, session_id: str, reason: SessionEndReason) -> None:
        """Stop the sandbox of a session that is over, where `session_end` is configured."""
        await self.release(session_id)

    async def release(self, session_id: str) -> None:
        """Stop a session's sandbox and forget it with all work; nothing happens where it has none."""
        self._unjudged.pop(session_id, None)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await self._stop(session)

    async def _stop(self, session: Session) -> None:
        try:
            await session.repository.sandbox.stop()
        finally:
            self._free_sandboxes.release()

    def _session_of(self, request: Request) -> Session:
        session = self._sessions.get(request.session[SESSION_ID_KEY])
        if session is None:
            raise HTTPException(HTTPStatus.GONE, _NO_SANDBOX)
        return session

    def _taken(self, session_id: str, row: SweRebenchRow) -> Session | Work:
        """Take what is to be judged, for this request alone: nothing is awaited here."""
        had = self._sessions.get(session_id) or self._unjudged.get(session_id)
        if had is None:
            raise HTTPException(HTTPStatus.GONE, _NO_SANDBOX)
        if had.digest != row.digest:
            raise HTTPException(HTTPStatus.CONFLICT, _other_row(had.instance_id, row.instance_id))
        self._sessions.pop(session_id, None)
        self._unjudged.pop(session_id, None)
        return had

    async def _judge_work(self, session_id: str, row: SweRebenchRow) -> tuple[bytes | None, Verdict]:
        """Return the agent's patch, where it could be read, and the verdict on it; ends the session's sandbox."""
        had = self._taken(session_id, row)
        async with AsyncExitStack() as stack:
            if isinstance(had, Session):
                stack.push_async_callback(self._stop, had)
            async with self._free_judgings:
                try:
                    work = had if isinstance(had, Work) else await self._work_of(had, row)
                except RepositoryError as error:
                    return None, Verdict(evaluation_completed=True, reason=str(error))
                await stack.aclose()
                verdict = await self._judge.judge(row, work.patch, baseline=work.baseline)
        verdict.timings["extract_s"] = work.extract_s
        if not verdict.evaluation_completed and session_id not in self._sessions:
            while len(self._unjudged) >= self.config.max_sandboxes:
                self._unjudged.pop(next(iter(self._unjudged)))
            self._unjudged[session_id] = work
        return work.patch, verdict

    async def _work_of(self, session: Session, row: SweRebenchRow) -> Work:
        started = time.monotonic()
        with _no_reward_for_trouble(row.instance_id):
            patch = await self._extract(session.repository, row)
        seconds = round(time.monotonic() - started, 3)
        return Work(session.instance_id, session.digest, patch, session.repository.baseline, seconds)

    async def _extract(self, repository: Repository, row: SweRebenchRow) -> bytes:
        owned = patch_paths(row.test_patch.encode("utf-8", "surrogatepass"))
        try:
            return await repository.extract_patch(owned, self.config.max_patch_bytes)
        except (PatchTooLargeError, OwnedFilesError):
            raise
        except RepositoryError as error:
            if error.of_the_machine:
                raise
        async with self._sandboxes.fresh(row) as pristine:
            return await repository.extract_patch(owned, self.config.max_patch_bytes, pristine)

    def _stopping_sandboxes(
        self, inner: Callable[[Any], AbstractAsyncContextManager[Any]]
    ) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[Any]:
            try:
                async with inner(app) as state:
                    yield state
            finally:
                await asyncio.gather(*(self.release(session_id) for session_id in list(self._sessions)))
                await self._sandboxes.close()

        return lifespan


_NO_SANDBOX: Final = (
    "this session has no sandbox: it was never seeded, or its sandbox is gone; call /seed_session first"
)


def _other_row(seeded: str, asked: str) -> str:
    if seeded != asked:
        return f"this session was seeded with {seeded}, and can't be verified as {asked}"
    return f"this session was seeded with another version of {seeded}: the row's tests, image or other fields differ"


@contextmanager
def _told() -> Iterator[None]:
    """Tell the model what its call got wrong; a lost sandbox ends the rollout."""
    try:
        yield
    except SandboxFileNotFoundError as error:
        raise HTTPException(HTTPStatus.NOT_FOUND, str(error)) from error
    except (SandboxFileError, tools.ToolError) as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
    except SandboxStoppedError as error:
        raise HTTPException(HTTPStatus.GONE, f"the session's sandbox is lost: {error}") from error
    except SandboxError as error:
        detail = f"the session's sandbox could not do this; it may be called again: {error}"
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail) from error


@contextmanager
def _no_reward_for_trouble(instance_id: str) -> Iterator[None]:
    """Answer trouble with a sandbox in a way that ends the rollout without a reward."""
    try:
        yield
    except SandboxStoppedError as error:
        raise HTTPException(HTTPStatus.GONE, f"the sandbox of {instance_id} is lost: {error}") from error
    except SandboxError as error:
        detail = f"a sandbox for {instance_id} could not be used: {error}"
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, detail) from error
    except RepositoryError as error:
        if error.of_the_machine:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, f"{instance_id}: {error}") from error
        raise


if __name__ == "__main__":
    SweRebenchResourcesServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = SweRebenchResourcesServer.run_webserver()
