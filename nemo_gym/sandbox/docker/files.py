"""Files of a container, moved by the Engine API's archives.

The daemon resolves paths within the container's own root, so a link that a program makes leads nowhere else. It does
not follow a path's last link, and an archive overwrites in place; hence the calls before and after.
"""

from __future__ import annotations

import contextlib
import itertools
import posixpath
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

from nemo_gym.errors import SandboxError, SandboxFileError, SandboxFileNotFoundError, SandboxStoppedError
from nemo_gym.sandbox.copying import aiter_of
from nemo_gym.sandbox.docker.archive import MAX_FILE_BYTES, Entry, PathStat, end, pack, unpack
from nemo_gym.sandbox.docker.commands import SHELL
from nemo_gym.sandbox.docker.engine import Engine, EngineError
from nemo_gym.sandbox.local_sandbox import uninterrupted
from nemo_gym.sandbox.providers.base import ExecRequest
from nemo_gym.sandbox.spec import SandboxExecResult

HELPER_TIMEOUT_S: Final = 30.0
HELPER_OUTPUT: Final = 4000
MAX_LINKS: Final = 8
NOT_FOUND: Final = 404


class ContainerFiles:
    """The files of one running container.

    Args:
        engine: The daemon.
        name: The container.
        workdir: What relative paths are relative to.
        own_workdir: Whether the image has that folder already, with an owner of its own.
        exec_as: Runs a command in the container, as another user when one is given.

    Attributes:
        owner: The numbers of the user and the group to whom written files belong.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        workdir: str,
        *,
        own_workdir: bool,
        exec_as: Callable[[ExecRequest, str | None], Awaitable[SandboxExecResult]],
    ) -> None:
        self.owner = (0, 0)
        self._engine, self._name, self._workdir = engine, name, workdir
        self._own_workdir = own_workdir
        self._exec_as = exec_as
        self._numbers = itertools.count()

    async def write_first(self, files: Mapping[str, str | bytes]) -> None:
        """Write the files of the spec in one archive: nobody is there yet who could see half of it."""
        if any(self.owner) and not self._own_workdir:
            folder = Entry(self._workdir[1:], None, 0o755, self.owner)
            await self._put("/", aiter_of([folder.header()]), self._workdir)
        if not files:
            return
        contents = {
            self._absolute(path): text.encode() if isinstance(text, str) else text for path, text in files.items()
        }
        folders = {posixpath.dirname(path) for path in contents} - {"/", self._workdir}
        if folders:
            await self._help('mkdir -p -- "$@"', *sorted(folders))
        await self._put("/", self._entries(contents), "its files")

    async def _entries(self, contents: Mapping[str, bytes]) -> AsyncIterator[bytes]:
        for path, data in contents.items():
            async for part in pack(Entry(path.lstrip("/"), len(data), 0o644, self.owner), aiter_of([data])):
                yield part

    async def content(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield a file's content; `SandboxFileError` when it is no regular file or longer than `max_bytes`."""
        target, limit = self._absolute(path), min(max_bytes, MAX_FILE_BYTES - 1)
        for _ in range(MAX_LINKS):
            async with self._archive("GET", target, path) as response:
                stat = PathStat.of(response.headers)
                if stat.is_link:
                    target = posixpath.join(posixpath.dirname(target), stat.link_target)
                    continue
                _check_regular(path, stat)
                if stat.size > limit:
                    raise SandboxFileError(f"{path}: has {stat.size} bytes, over {limit}")
                left = limit
                async for data in unpack(response.content):
                    left -= len(data)
                    if left < 0:  # it grew meanwhile
                        raise SandboxFileError(f"{path}: has more than {limit} bytes, over {limit}")
                    yield data
                return
        raise SandboxFileError(f"{path}: too many levels of symbolic links")

    async def replace(self, path: str, size: int, mode: int | None, chunks: AsyncIterator[bytes]) -> None:
        """Put a new file in the old one's place, so that nobody sees half of it and no hard link is written through."""
        if size >= MAX_FILE_BYTES:
            raise SandboxFileError(f"{path}: has {size} bytes, over {MAX_FILE_BYTES - 1}")
        target, old = await self._locate(path)
        permissions = (old.permissions if old else 0o644) if mode is None else mode
        folder = posixpath.dirname(target)
        if old is None and await self._stat(folder, path) is None:
            await self._help('mkdir -p -- "$1"', folder, about=path)
        temporary = f".{next(self._numbers)}.sandbox-write"
        try:
            await self._put(folder, pack(Entry(temporary, size, permissions, self.owner), chunks), path)
            await self._help('mv -f -- "$1" "$2"', posixpath.join(folder, temporary), target, about=path)
        except SandboxStoppedError:
            raise
        except BaseException:
            with contextlib.suppress(SandboxError):
                await uninterrupted(self._help('rm -f -- "$1"', posixpath.join(folder, temporary), user="0"))
            raise

    async def _locate(self, path: str) -> tuple[str, PathStat | None]:
        """Return where a file is written that `path` names, links followed, and what is there now."""
        target = self._absolute(path)
        for _ in range(MAX_LINKS):
            stat = await self._stat(target, path)
            if stat is None:
                return target, None
            if not stat.is_link:
                _check_regular(path, stat)
                return target, stat
            target = posixpath.join(posixpath.dirname(target), stat.link_target)
        raise SandboxFileError(f"{path}: too many levels of symbolic links")

    async def _stat(self, target: str, about: str) -> PathStat | None:
        try:
            async with self._archive("HEAD", target, about) as response:
                return PathStat.of(response.headers)
        except SandboxFileNotFoundError:
            return None

    async def _put(self, folder: str, parts: AsyncIterator[bytes], about: str) -> None:
        problems: list[SandboxFileError] = []

        async def body() -> AsyncIterator[bytes]:
            try:
                async for part in parts:
                    yield part
                yield end()
            except SandboxFileError as error:
                problems.append(error)  # the client would not hand it on as it is
                raise

        try:
            async with self._archive("PUT", folder, about, body()):
                pass
        except SandboxFileError as error:
            raise (problems or [error])[0] from error.__cause__

    @contextlib.asynccontextmanager
    async def _archive(
        self, method: str, target: str, about: str, data: AsyncIterator[bytes] | None = None
    ) -> AsyncIterator[Any]:
        """Make a call about a path in the container; what is wrong with the path is an error that names `about`."""
        path = f"/containers/{self._name}/archive"
        try:
            async with self._engine.opened(method, path, {"path": target}, data) as response:
                yield response
        except EngineError as error:
            if error.status == NOT_FOUND and "no such container" in str(error).lower() and self._name in str(error):
                raise SandboxStoppedError(f"the sandbox {self._name} is gone") from error
            kind = SandboxFileNotFoundError if error.status == NOT_FOUND else SandboxFileError
            raise kind(f"{about}: {error}") from error

    async def _help(self, script: str, *arguments: str, about: str = "its files", user: str | None = None) -> None:
        """Run a small script of our own in the container; SandboxFileError when it fails."""
        argv = [SHELL, "-c", script, "sandbox", *arguments]
        request = ExecRequest(command=argv, timeout_s=HELPER_TIMEOUT_S, cwd="/", max_output_bytes=HELPER_OUTPUT)
        result = await self._exec_as(request, user)
        if not result.ok:
            raise SandboxFileError(f"{about}: {result.stderr.strip() or 'it took too long'}")

    def _absolute(self, path: str) -> str:
        return posixpath.join(self._workdir, path)


def _check_regular(path: str, stat: PathStat) -> None:
    if not stat.is_regular:
        raise SandboxFileError(f"{path}: {'is a directory' if stat.is_directory else 'is no regular file'}")
