"""One running local sandbox as its worker sees it: the guard process, the control socket, and requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from nemo_gym.errors import (
    SandboxCreateError,
    SandboxError,
    SandboxFileError,
    SandboxFileNotFoundError,
    SandboxStoppedError,
)
from nemo_gym.sandbox.channel import Channel, frame
from nemo_gym.sandbox.copying import COPY_BYTES, aiter_of, open_regular, read_in_thread, write_in_thread
from nemo_gym.sandbox.folders import MARKER, create_folder, remove_leftovers
from nemo_gym.sandbox.isolation import (
    INSIDE_HOME,
    INSIDE_SUPERVISOR,
    INSIDE_TMP,
    PYTHON,
    SUPERVISOR,
    Bubblewrap,
    Mounts,
)
from nemo_gym.sandbox.process_supervisor import exec_timeout
from nemo_gym.sandbox.providers.base import ExecRequest, RunningSandbox
from nemo_gym.sandbox.spec import SandboxExecResult, SandboxHandle, SandboxResources, SandboxStatus
from nemo_gym.sandbox.supervision.frames import CHUNK, FRAME
from nemo_gym.sandbox.utils import cpu_cap_env

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S: Final = 30.0
REPLY_TIMEOUT_S: Final = 30.0
"""Seconds without any progress of a request after which its sandbox is taken for dead."""
LOST_WAIT_S: Final = 0.5
KILLED: Final = 128 + signal.SIGKILL
LOG_BYTES: Final = 4000
DEFAULT_SHM_BYTES: Final = 64 << 20
SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_OPEN_FILES: Final = 4096


@dataclass(frozen=True)
class Launch:
    """How to start one sandbox.

    Attributes:
        root: Where its folder is made.
        image: The folder whose content the workdir starts with.
        bubblewrap: What isolates it; None for nothing.
        workdir: Where the workdir is seen in bubblewrap.
        env: Variables for its commands.
        network: Whether it shares this machine's network.
        visible: Paths of this machine that may be read in bubblewrap.
        resources: Its limits.
    """

    root: Path
    image: Path | None
    bubblewrap: Bubblewrap | None
    workdir: str
    env: Mapping[str, str]
    network: bool
    visible: tuple[Path, ...]
    resources: SandboxResources

    def limits(self) -> dict[str, tuple[int, int]]:
        """Return the limits that the kernel keeps for each process, soft and hard, by their names in `resource`."""
        wanted = self.resources
        limits = {"RLIMIT_CORE": (0, 0), "RLIMIT_NOFILE": (MAX_OPEN_FILES, MAX_OPEN_FILES)}
        if wanted.memory_mb:
            limits["RLIMIT_DATA"] = (wanted.memory_mb << 20, wanted.memory_mb << 20)
        if wanted.file_size_mb:
            limits["RLIMIT_FSIZE"] = (wanted.file_size_mb << 20, wanted.file_size_mb << 20)
        if wanted.cpu_time_s:
            limits["RLIMIT_CPU"] = (wanted.cpu_time_s, wanted.cpu_time_s + 2)
        if wanted.processes and self.bubblewrap and os.getuid() and _counts_processes_by_namespace():
            # A margin for the supervisor's own and for threads, which count here; the supervisor counts exactly.
            limits["RLIMIT_NPROC"] = (wanted.processes * 2 + 64, wanted.processes * 2 + 64)
        return limits


def _counts_processes_by_namespace() -> bool:
    """Whether RLIMIT_NPROC is the sandbox's alone (Linux 5.14), not shared with all the user runs."""
    release = os.uname().release.split(".")
    return tuple(int(part) for part in release[:2] if part.isdigit()) >= (5, 14)


async def uninterrupted(work: Awaitable[T]) -> T:
    """Await `work` to its end even when cancelled meanwhile; then the cancellation goes on."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled():
                cancelled = error
        except Exception:  # noqa: BLE001 - task.result() raises it below
            break
    if cancelled is not None:
        task.exception()  # so that nobody is told that it was never looked at
        raise cancelled
    return task.result()


class LocalSandbox(RunningSandbox):
    """A sandbox on this machine.

    Args:
        launch: How to start it.
        on_end: Called once nothing of it is left.
    """

    def __init__(self, launch: Launch, on_end: Callable[[LocalSandbox], None]) -> None:
        self._launch = launch
        self._on_end = on_end
        self._status = SandboxStatus.CREATED
        self._folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._log: int | None = None
        self._control, self._theirs = socket.socketpair()
        self._control.setblocking(False)
        self._ending = asyncio.Event()
        self._gone = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._cleaner: asyncio.Task[None] | None = None

    @property
    def status(self) -> SandboxStatus:
        """Where it is in its life."""
        return self._status

    async def start(self, files: Mapping[str, str | bytes]) -> None:
        """Start it; after an error, `stop` removes what there is of it.

        Raises:
            SandboxCreateError: When it can't be started.
        """
        try:
            await uninterrupted(asyncio.to_thread(self._start_guard))
        except OSError as error:
            raise SandboxCreateError(f"the sandbox's supervisor can't be started: {error}") from error
        await self._introduce()
        self._watcher = asyncio.create_task(self._watch())
        self._status = SandboxStatus.RUNNING
        for path, content in files.items():
            try:
                await self.write(path, content.encode() if isinstance(content, str) else content, None)
            except SandboxError as error:
                raise SandboxCreateError(f"the sandbox's file {path!r} can't be written: {error}") from error

    def _start_guard(self) -> None:
        """Make the folder and start the guard in it. Blocks."""
        with self._theirs as theirs:
            self._folder, lock = create_folder(self._launch.root)
            try:
                self._log = os.memfd_create("sandbox-log")
                self._guard = subprocess.Popen(  # noqa: S603 - a list, no shell
                    [PYTHON, "-I", "-S", str(SUPERVISOR), "guard", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._log,
                    pass_fds=(theirs.fileno(), lock),
                    env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", MARKER: self._folder.name},
                    cwd="/",
                    start_new_session=True,  # a Ctrl-C at the terminal is the worker's to handle
                )
            finally:
                os.close(lock)
            self._frames = self._description(theirs.fileno(), lock)

    def _description(self, control: int, lock: int) -> bytes:
        """Return the frames that tell the guard and the server what they are for."""
        launch, folder = self._launch, self._folder
        assert folder is not None
        mounts = Mounts(folder / "work", folder / "home", folder / "tmp", launch.workdir)
        isolate = None
        home, tmp, workdir = str(mounts.home), str(mounts.tmp), str(mounts.work)
        roots = [workdir, home, tmp]
        if launch.bubblewrap:
            home, tmp, workdir, roots = INSIDE_HOME, INSIDE_TMP, launch.workdir, ["/"]
            inside = [PYTHON, "-I", "-S", f"{INSIDE_SUPERVISOR}/{SUPERVISOR.name}", "serve", str(control)]
            shm = (launch.resources.memory_mb or 0) << 20 or DEFAULT_SHM_BYTES
            isolate = launch.bubblewrap.command(
                mounts, inside, network=launch.network, shm_bytes=shm, visible=launch.visible
            )
        self.handle = SandboxHandle(provider="local", id=folder.name, workdir=workdir)
        guard = {
            "folder": str(folder),
            "worker": os.getpid(),
            "keep_from_server": [lock],
            "copy_from": str(launch.image) if launch.image else None,
            "copy_to": str(mounts.work),
            "isolate": isolate,
        }
        own = {
            "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
            "HOME": home,
            "TMPDIR": tmp,
            "LANG": "C.UTF-8",
            MARKER: folder.name,
        }
        server = {
            "workdir": workdir,
            "roots": roots,
            "env": own | cpu_cap_env(launch.resources.cpu) | dict(launch.env),
            "limits": launch.limits(),
            "max_processes": launch.resources.processes,
            "max_memory": (launch.resources.memory_mb or 0) << 20,
            "private": isolate is not None,
        }
        return frame(guard) + frame(server)

    async def _introduce(self) -> None:
        """Send the descriptions, and wait until the server is ready."""
        loop = asyncio.get_running_loop()
        problem = "its supervisor died"
        with contextlib.suppress(OSError, EOFError):
            await loop.sock_sendall(self._control, self._frames)
            header_size, _ = FRAME.unpack(await self._receive(FRAME.size))
            reply = json.loads(await self._receive(header_size))
            if "ready" in reply:
                return
            problem = reply.get("error", problem)
        raise SandboxCreateError(f"the sandbox did not start: {problem}{self._logged()}")

    async def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = await asyncio.get_running_loop().sock_recv(self._control, size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _logged(self) -> str:
        """Return the beginning of what the supervisor wrote to its error stream, as an end of a sentence."""
        if self._log is None:
            return ""
        text = os.pread(self._log, LOG_BYTES, 0).decode(errors="replace").strip()
        return f": {text}" if text else ""

    async def _watch(self) -> None:
        """Notice the end of the server (the guard says so) and of the guard (the socket ends)."""
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self._control, CHUNK):
                self._note_end()
        self._note_end()
        self._gone.set()
        if self._cleaner is None:
            self._cleaner = asyncio.create_task(self._clean_up())

    def _note_end(self) -> None:
        self._ending.set()
        if self._status is SandboxStatus.RUNNING:
            self._status = SandboxStatus.FAILED
            logger.warning("the sandbox %s died", self.handle.id)

    async def stop(self) -> None:
        """Kill what runs and remove what it wrote."""
        if self._status is not SandboxStatus.FAILED:
            self._status = SandboxStatus.STOPPED
        if self._cleaner is None:
            self._cleaner = asyncio.create_task(self._clean_up())
        await asyncio.shield(self._cleaner)

    async def _clean_up(self) -> None:
        try:
            if self._guard is not None:
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_WR)
                self._watcher = self._watcher or asyncio.create_task(self._watch())
                try:
                    async with asyncio.timeout(STOP_TIMEOUT_S):
                        await self._gone.wait()
                except TimeoutError:
                    logger.warning("the guard of the sandbox %s does not end: killing it", self.handle.id)
                    self._guard.kill()
            if self._folder is not None:
                await asyncio.to_thread(self._remove_rest, self._folder)
        finally:
            if self._watcher is not None and not self._watcher.done():
                self._watcher.cancel()
            self._control.close()
            self._theirs.close()
            if self._log is not None:
                os.close(self._log)
                self._log = None
            self._on_end(self)

    def _remove_rest(self, folder: Path) -> None:
        """Collect the guard, and do what it could not. Blocks."""
        if self._guard is not None:
            try:
                self._guard.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
        if folder.exists():
            remove_leftovers(folder)

    async def exec(self, request: ExecRequest) -> SandboxExecResult:
        """Run a command (see `RunningSandbox.exec`)."""
        command = request.command
        header = {
            "do": "exec",
            "argv": command if isinstance(command, str) else list(command),
            "cwd": request.cwd,
            "env": dict(request.env),
            "timeout": request.timeout_s,
            "max_output": request.max_output_bytes,
        }
        async with self._request(header, request.stdin or b"") as channel:
            try:
                async with asyncio.timeout(exec_timeout(request.timeout_s)):
                    reply, output = await channel.receive(2 * request.max_output_bytes + LOG_BYTES)
            except EOFError:
                await self._raise_if_ended()
                return SandboxExecResult(return_code=None, stderr="sandbox: the command killed its own supervisor\n")
        await self._raise_if_killed_by_end(reply)
        if "error" in reply:
            return SandboxExecResult(
                return_code=None, stderr=f"sandbox: no command could be started: {reply['text']}\n"
            )
        stderr = output[reply["out"] :].decode(errors="replace")
        if reply["exceeded"]:
            stderr += f"\nsandbox: killed for using more {reply['exceeded']} than its limit\n"
        return SandboxExecResult(
            return_code=reply["return_code"],
            stdout=output[: reply["out"]].decode(errors="replace"),
            stderr=stderr,
            timed_out=reply["timed_out"],
            truncated=reply["cut"],
            duration_s=reply["duration"],
        )

    async def read(self, path: str, max_bytes: int) -> bytes:
        """Return a file's content."""
        async with contextlib.aclosing(self._content(path, max_bytes)) as content:
            return b"".join([data async for data in content])

    async def write(self, path: str, data: bytes, mode: int | None) -> None:
        """Replace a file's content."""
        view = memoryview(data)
        chunks = (bytes(view[start : start + COPY_BYTES]) for start in range(0, len(data), COPY_BYTES))
        await self._replace(path, mode, aiter_of(chunks))

    async def upload(self, local: Path, path: str) -> None:
        """Write a file of this machine to `path`."""
        file = await asyncio.to_thread(open_regular, local)
        try:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            await self._replace(path, mode, read_in_thread(file))
        finally:
            file.close()

    async def download(self, path: str, local: Path, max_bytes: int) -> None:
        """Write a file of the sandbox to `local`."""
        async with contextlib.aclosing(self._content(path, max_bytes)) as content:
            await write_in_thread(local, content)

    async def _content(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        header: dict[str, Any] = {"do": "read", "path": path, "max_bytes": max_bytes}
        async with self._request(header) as channel:
            while "end" not in header:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    header, data = await channel.receive(CHUNK)
                yield data
        _raise_file_error(path, header)

    async def _replace(self, path: str, mode: int | None, chunks: AsyncIterator[bytes]) -> None:
        async with self._request({"do": "write", "path": path, "mode": mode}) as channel:
            async for data in chunks:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    await channel.send({}, data)
            await channel.send({"end": True})
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                header, _ = await channel.receive(0)
        _raise_file_error(path, header)

    @contextlib.asynccontextmanager
    async def _request(self, header: dict[str, Any], payload: bytes = b"") -> AsyncIterator[Channel]:
        """Make a request that the server has taken on; leaving early cancels it."""
        if self._status is not SandboxStatus.RUNNING:
            raise SandboxStoppedError(self._why_ended())
        channel = None
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                channel = await Channel.open(self._control)
                await channel.send(header, payload)
                accepted, _ = await channel.receive(0)
            if "error" in accepted:
                raise SandboxError(f"the sandbox could not take the request: {accepted['text']}")
            yield channel
        except TimeoutError:
            self._note_end()
            await self.stop()
            raise SandboxStoppedError(f"{self._why_ended()}: it did not answer any more") from None
        except EOFError:
            await self._raise_if_ended()
            raise SandboxError("the process that handled the request was killed in the sandbox") from None
        finally:
            if channel is not None:
                channel.close()

    async def _raise_if_ended(self) -> None:
        """Raise where the sandbox, and not only one request, has come to its end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOST_WAIT_S):
                await self._ending.wait()
        if self._status is not SandboxStatus.RUNNING:
            raise SandboxStoppedError(self._why_ended())

    async def _raise_if_killed_by_end(self, reply: Mapping[str, Any]) -> None:
        """Raise where a command was killed because the sandbox ends: that is told before or after the end itself."""
        killed = reply.get("return_code") == KILLED and not (reply["timed_out"] or reply["exceeded"])
        if killed or self._status is not SandboxStatus.RUNNING:
            await self._raise_if_ended()

    def _why_ended(self) -> str:
        what = "died" if self._status is SandboxStatus.FAILED else "has been stopped"
        return f"the sandbox {self.handle.id} {what}"


def _raise_file_error(path: str, reply: Mapping[str, Any]) -> None:
    if "error" in reply:
        kind = SandboxFileNotFoundError if reply["error"] == errno.ENOENT else SandboxFileError
        raise kind(f"{path}: {reply['text']}")
