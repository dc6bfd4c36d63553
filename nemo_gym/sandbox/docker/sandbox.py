"""One running container as its worker sees it.

Lifecycle: the worker attaches to the main process's standard input before it starts the container. That connection
carries the orders to kill commands, and its end tells the worker that the container has ended, and the container that
the worker has. `stop` removes the container.

Failure policy: a container that ends by itself, or whose main process does not answer, has failed; it is removed. A
daemon that refuses or hangs is a `SandboxError` of the call, and the sandbox goes on as long as its connection lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from nemo_gym.errors import SandboxCreateError, SandboxError, SandboxStoppedError
from nemo_gym.sandbox.copying import aiter_of, open_regular, read_in_thread, write_in_thread
from nemo_gym.sandbox.docker.commands import Command
from nemo_gym.sandbox.docker.engine import STDERR, STDOUT, Engine, EngineError, Stream
from nemo_gym.sandbox.docker.files import ContainerFiles
from nemo_gym.sandbox.docker.owners import GONE, remove
from nemo_gym.sandbox.local_sandbox import uninterrupted
from nemo_gym.sandbox.providers.base import ExecRequest, RunningSandbox
from nemo_gym.sandbox.spec import SandboxExecResult, SandboxHandle, SandboxStatus
from nemo_gym.sandbox.supervision.command import DRAIN_GRACE_S, TERM_GRACE_S

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 30.0
ORDER_TIMEOUT_S: Final = 10.0
"""Seconds within which the main process has killed a command, or is taken for dead."""
LOST_WAIT_S: Final = 0.5
MAX_LINE: Final = 4096


class DockerSandbox(RunningSandbox):
    """A sandbox in a container.

    Args:
        engine: The daemon; the sandbox closes it.
        name: The container's name.
        workdir: Where its commands run.
        own_workdir: Whether the image has that folder already, with an owner of its own.
        on_end: Called once nothing of it is left.
    """

    def __init__(
        self, engine: Engine, name: str, workdir: str, *, own_workdir: bool, on_end: Callable[[DockerSandbox], None]
    ) -> None:
        self.handle = SandboxHandle(provider="docker", id=name, workdir=workdir)
        self._engine, self._name, self._path = engine, name, f"/containers/{name}"
        self._on_end = on_end
        self._status = SandboxStatus.CREATED
        self._made = False
        self._control: Stream | None = None
        self._ready, self._ending = asyncio.Event(), asyncio.Event()
        self._said = b""
        self._files = ContainerFiles(engine, name, workdir, own_workdir=own_workdir, exec_as=self._exec)
        self._orders: dict[bytes, asyncio.Future[None]] = {}
        self._commands: dict[asyncio.Task[SandboxExecResult], Command] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._cleaner: asyncio.Task[None] | None = None

    @property
    def status(self) -> SandboxStatus:
        """Where it is in its life."""
        return self._status

    async def start(self, description: Mapping[str, Any], files: Mapping[str, str | bytes]) -> None:
        """Create and start the container; after an error, `stop` removes what there is of it.

        Raises:
            SandboxError: When it can't be started.
        """
        self._made = True
        try:
            # Once it is asked for, only the answer tells whether there is something to remove.
            creating = self._engine.call("POST", "/containers/create", {"name": self._name}, dict(description))
            await uninterrupted(creating)
        except EngineError as error:
            self._made = error.sent and error.status is None
            raise
        wanted = {"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1}
        self._control = await self._engine.stream(f"{self._path}/attach", wanted)
        self._watcher = asyncio.create_task(self._watch(self._control))
        await self._engine.call("POST", f"{self._path}/start")
        await self._ready.wait()
        if self._ending.is_set():
            said = self._said.decode(errors="replace").strip()
            raise SandboxCreateError(f"the container ended at its start: {said or 'it does not say why'}")
        self._status = SandboxStatus.RUNNING
        try:
            await self._files.write_first(files)
        except SandboxError as error:
            raise SandboxCreateError(f"the sandbox's files {', '.join(files)} can't be written: {error}") from error

    async def _watch(self, control: Stream) -> None:
        """Take what the main process says, to its end."""
        line = b""
        try:
            async for kind, data in control.frames():
                if kind == STDERR or not self._ready.is_set():
                    self._said = (self._said + data)[:MAX_LINE]
                if kind == STDOUT:
                    *lines, line = (line + data).split(b"\n")
                    line = line[:MAX_LINE]
                    for complete in lines:
                        self._hear(complete.split(b" "))
        except EngineError as error:
            self._said = self._said or str(error).encode()
        self._note_end()
        if self._cleaner is None:
            self._cleaner = asyncio.create_task(self._clean_up())

    def _hear(self, words: list[bytes]) -> None:
        if words[0] == b"ready" and not self._ready.is_set():  # later a program may say so, on the same output
            numbers = [int(word) if word.isdigit() else 0 for word in (*words[1:], b"", b"")]
            self._files.owner = (numbers[0], numbers[1])
            self._ready.set()
        elif words[0] == b"done" and len(words) > 1:
            order = self._orders.get(words[1])
            if order is not None and not order.done():
                order.set_result(None)

    def _note_end(self) -> None:
        self._ending.set()
        self._ready.set()
        if self._status is SandboxStatus.RUNNING:
            self._status = SandboxStatus.FAILED
            logger.warning("the sandbox %s died", self._name)
        for command in self._commands.values():
            command.lose()

    async def stop(self) -> None:
        """Kill what runs and remove what it wrote."""
        if self._status is not SandboxStatus.FAILED:
            self._status = SandboxStatus.STOPPED
        if self._cleaner is None:
            self._cleaner = asyncio.create_task(self._clean_up())
        await asyncio.shield(self._cleaner)

    async def _clean_up(self) -> None:
        try:
            if self._made:
                await remove(self._engine, self._name, STOP_TIMEOUT_S)
        except EngineError as error:
            logger.warning("the container %s could not be removed, and may be left: %s", self._name, error)
        finally:
            self._note_end()
            if self._control is not None:
                self._control.close()
            rest: list[asyncio.Task[Any]] = list(self._commands)
            if self._watcher is not None:
                self._watcher.cancel()
                rest.append(self._watcher)
            if rest:
                _, late = await asyncio.wait(rest, timeout=1)
                for task in late:
                    task.cancel()
            await self._engine.close()
            self._on_end(self)

    async def exec(self, request: ExecRequest) -> SandboxExecResult:
        """Run a command (see `RunningSandbox.exec`)."""
        return await self._exec(request)

    async def _exec(self, request: ExecRequest, user: str | None = None) -> SandboxExecResult:
        self._check_running()
        command = Command(request.max_output_bytes)
        task = asyncio.create_task(self._run(command, request, user))
        self._commands[task] = command
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            command.cancel()  # the task goes on until it is killed
            if task.cancelled():
                raise SandboxStoppedError(self._why_ended()) from None
            raise

    def _forget(self, task: asyncio.Task[SandboxExecResult]) -> None:
        del self._commands[task]
        if not task.cancelled():
            task.exception()  # it is nobody's when the caller has gone

    async def _run(self, command: Command, request: ExecRequest, user: str | None) -> SandboxExecResult:
        description = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Cmd": command.arguments(request, posixpath.join(self.handle.workdir, request.cwd or "")),
            "Env": [*(f"{name}={value}" for name, value in request.env.items()), command.variable()],
        }
        if user is not None:
            description["User"] = user
        made = await self._answer(self._engine.call("POST", f"{self._path}/exec", body=description))
        path = f"/exec/{made['Id']}/start"
        stream = await self._answer(self._engine.stream(path, body={"Detach": False, "Tty": False}))
        feeding = asyncio.create_task(_feed(stream, command.standard_input(request)))
        tasks = [asyncio.create_task(command.follow(stream)), feeding]
        try:
            await self._accompany(command, request.timeout_s)
            if not (command.reported or command.timed_out):
                await self._raise_if_ended()
                if command.problem is not None:
                    raise command.problem
            return command.result()
        finally:
            stream.close()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _accompany(self, command: Command, timeout_s: float) -> None:
        """Wait for the end of a started command, or bring it about."""
        if not await _within(self._engine.timeout_s, command.started):
            await self._signal("KILL", command)
            raise SandboxError(f"{self._engine.where} started no command within {self._engine.timeout_s:g} s")
        if not await _within(timeout_s, command.exited):
            command.timed_out = True
            await self._signal("TERM", command)
            await _within(TERM_GRACE_S, command.exited)
        if command.timed_out or command.cancelled or not command.reported:
            await self._signal("KILL", command)
        if not command.cancelled:
            await _within(DRAIN_GRACE_S, command.closed)

    async def _signal(self, signal: str, command: Command) -> None:
        """Have the main process signal what belongs to a command; a main process that does not has failed."""
        if self._control is None or self._ending.is_set():
            return
        order, answer = secrets.token_hex(8), asyncio.get_running_loop().create_future()
        self._orders[order.encode()] = answer
        try:
            async with asyncio.timeout(ORDER_TIMEOUT_S):
                await self._control.send(f"{order} {signal} {command.leader} {command.variable()}\n".encode())
                ending = asyncio.create_task(self._ending.wait())
                try:
                    await asyncio.wait({answer, ending}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ending.cancel()
        except (TimeoutError, EngineError) as error:
            logger.warning("the main process of the sandbox %s does not answer: %s", self._name, error)
            self._note_end()
            if self._cleaner is None:
                self._cleaner = asyncio.create_task(self._clean_up())
        finally:
            del self._orders[order.encode()]

    async def read(self, path: str, max_bytes: int) -> bytes:
        """Return a file's content."""
        self._check_running()
        async with contextlib.aclosing(self._files.content(path, max_bytes)) as content:
            return b"".join([data async for data in content])

    async def download(self, path: str, local: Path, max_bytes: int) -> None:
        """Write a file of the sandbox to `local`."""
        self._check_running()
        async with contextlib.aclosing(self._files.content(path, max_bytes)) as content:
            await write_in_thread(local, content)

    async def write(self, path: str, data: bytes, mode: int | None) -> None:
        """Replace a file's content."""
        self._check_running()
        await self._files.replace(path, len(data), mode, aiter_of([data]))

    async def upload(self, local: Path, path: str) -> None:
        """Write a file of this machine to `path`."""
        self._check_running()
        file = await asyncio.to_thread(open_regular, local)
        try:
            status = os.fstat(file.fileno())
            await self._files.replace(path, status.st_size, status.st_mode & 0o777, read_in_thread(file))
        finally:
            file.close()

    def _check_running(self) -> None:
        if self._status is not SandboxStatus.RUNNING:
            raise SandboxStoppedError(self._why_ended())

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """Await a call about the container; SandboxStoppedError when it fails because the container is gone."""
        try:
            return await call
        except EngineError as error:
            if error.status in (None, *GONE):
                await _within(LOST_WAIT_S, self._ending)
            self._check_running()
            raise

    async def _raise_if_ended(self) -> None:
        """Raise where the container, and not only one command, has come to its end."""
        try:
            found = await self._engine.call("GET", f"{self._path}/json")
            runs = bool(found["State"]["Running"])
        except (EngineError, KeyError, TypeError):
            runs = False
        if not runs:
            await _within(LOST_WAIT_S, self._ending)
        self._check_running()

    def _why_ended(self) -> str:
        what = "died" if self._status is SandboxStatus.FAILED else "has been stopped"
        return f"the sandbox {self._name} {what}"


async def _feed(stream: Stream, data: bytes) -> None:
    with contextlib.suppress(EngineError):  # a command may end without reading it all
        await stream.send(data, last=True)


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()
