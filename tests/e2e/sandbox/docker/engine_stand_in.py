# ruff: noqa: ASYNC240 - small files of this machine
"""A stand-in of the Docker daemon: the Engine API on a Unix socket, with processes of this machine as containers.

It behaves like the real one in what sandboxes use: attached standard input that ends with its connection, streams in
frames, an exec that stays open while somebody holds its output, links resolved in archives, errors as JSON. A container
has no root of its own, so its paths are this machine's. It always has process numbers of its own: its main process
signals what it finds. It speaks HTTP by hand, for the real one takes connections out of HTTP and closes only half of
them.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import tarfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from nemo_gym.sandbox.folders import marked


@dataclass
class Call:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Container:
    """One container: its description, and its main process once it is started."""

    id: str
    name: str
    description: dict[str, Any]
    main: asyncio.subprocess.Process | None = None
    attached: asyncio.StreamWriter | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    removed: asyncio.Event = field(default_factory=asyncio.Event)


AS_USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
OWN_NUMBERS = ["unshare", *AS_USER, "--pid", "--fork", "--kill-child", "--mount-proc"]
JOIN = ["nsenter", *(["-U", "--preserve-credentials"] if AS_USER else []), "-p", "-m", "--wd=."]


@functools.cache
def own_numbers() -> bool:
    """Whether a container may have process numbers of its own here."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    probe = [*OWN_NUMBERS, "sh", "-c", 'read -r own rest </proc/self/stat && test "$$" = 1 && test "$own" = 1']
    return not subprocess.run(probe, capture_output=True, check=False).returncode


def first_child(pid: int) -> str:
    """Return the process that is number 1 of the container whose `unshare` has the number `pid`."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]


class Refusal(Exception):  # noqa: N818 - an answer
    """An error as the daemon answers it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StandIn:
    """The daemon. `faults` maps a pattern of "METHOD /path" to what happens instead of the answer."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.version: dict[str, Any] = {"ApiVersion": "1.47", "MinAPIVersion": "1.24", "Os": "linux"}
        self.images: dict[str, dict[str, Any]] = {"box:1": {"Config": {"WorkingDir": ""}}}
        self.pullable: dict[str, dict[str, Any]] = {}
        self.takes_over = "upgrade"
        self.faults: dict[str, Callable[[Call], Awaitable[bool]]] = {}
        self.containers: dict[str, Container] = {}
        self.descriptions: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self._execs: dict[str, tuple[Container, dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> StandIn:
        self._server = await asyncio.start_unix_server(self._connected, self.socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        for container in list(self.containers.values()):
            await self._remove(container)
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes:
            process._transport.close()  # type: ignore[attr-defined]
            await process.wait()
        self.socket.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._serve(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, IndexError):  # an exec came to an end of its container
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = first.split()
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        url = urlsplit(target)
        path = re.sub(r"^/v\d+\.\d+", "", unquote(url.path))
        self.calls.append(f"{method} {unquote(url.path)}")
        call = Call(method, path, dict(parse_qsl(url.query)), b"", reader, writer)
        for pattern, fault in self.faults.items():
            if re.fullmatch(pattern, f"{method} {path}") and await fault(call):
                return False
        call.body = await _body(reader, headers)
        try:
            return await self._route(call)
        except Refusal as refusal:
            await answer(call, {"message": str(refusal)}, refusal.status)
            return True

    async def _route(self, call: Call) -> bool:
        if call.path == "/version":
            await answer(call, self.version)
        elif call.path == "/images/create":
            await self._pull(call)
        elif call.path.startswith("/images/"):
            name = call.path.removeprefix("/images/").removesuffix("/json")
            if name not in self.images:
                raise Refusal(404, f"No such image: {name}")
            await answer(call, self.images[name])
        elif call.path == "/containers/create":
            await self._create(call)
        elif call.path == "/containers/json":
            await self._list(call)
        elif match := re.fullmatch(r"/exec/(\w+)/start", call.path):
            await self._exec_start(call, *self._execs[match[1]])
            return False
        elif match := re.fullmatch(r"/containers/([\w.-]+)(/\w+)?", call.path):
            return await self._container(call, self._find(match[1]), match[2])
        else:
            raise Refusal(404, "page not found")
        return True

    async def _container(self, call: Call, container: Container, action: str | None) -> bool:
        if action == "/attach":
            await self._attach(call, container)
            return False
        if call.method == "DELETE":
            await self._remove(container)
            await answer(call, None, 204)
        elif action == "/start":
            await self._start(container)
            await answer(call, None, 204)
        elif action == "/exec":
            if container.main is None or container.main.returncode is not None:
                raise Refusal(409, f"container {container.id} is not running")
            key = secrets.token_hex(8)
            self._execs[key] = (container, call.json())
            await answer(call, {"Id": key}, 201)
        elif action == "/json":
            await answer(call, {"State": {"Running": container.main is not None}})
        elif action == "/archive":
            await self._archive(call)
        else:
            raise Refusal(404, "page not found")
        return True

    def _find(self, name: str) -> Container:
        for container in self.containers.values():
            if name in (container.id, container.name):
                return container
        raise Refusal(404, f"No such container: {name}")

    async def _pull(self, call: Call) -> None:
        name = f"{call.query['fromImage']}:{call.query['tag']}"
        lines = [{"status": "Pulling"}, {"status": "Downloading", "progress": "[==> ]"}]
        if name in self.pullable:
            self.images[name] = self.pullable[name]
        else:
            lines.append({"error": f"manifest for {name} not found", "errorDetail": {"message": "manifest"}})
        call.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for line in lines:
            call.writer.write(_chunk(json.dumps(line).encode() + b"\r\n"))
            await call.writer.drain()
        call.writer.write(b"0\r\n\r\n")

    async def _create(self, call: Call) -> None:
        description = call.json()
        if description["Image"] not in self.images:
            raise Refusal(404, f"No such image: {description['Image']}")
        container = Container(secrets.token_hex(32), call.query["name"], description)
        self.containers[container.id] = container
        self.descriptions.append(description)
        await answer(call, {"Id": container.id, "Warnings": []}, 201)

    async def _list(self, call: Call) -> None:
        wanted = json.loads(call.query["filters"])["label"]
        found = []
        for container in self.containers.values():
            labels = container.description["Labels"]
            if all(label in [f"{key}={value}" for key, value in labels.items()] for label in wanted):
                found.append({"Id": container.id, "Names": [f"/{container.name}"], "Labels": labels})
        await answer(call, found)

    async def _attach(self, call: Call, container: Container) -> None:
        container.attached = call.writer
        write = await self._take_over(call)
        self._spawn(self._main_output(container, write))
        while data := await call.reader.read(1 << 16):
            if container.main is not None and container.main.stdin is not None:
                container.main.stdin.write(data)
        if container.main is not None and container.main.stdin is not None:
            container.main.stdin.close()  # StdinOnce
        await container.removed.wait()

    async def _main_output(self, container: Container, write: Callable[[int, bytes], None]) -> None:
        waiting = [asyncio.create_task(event.wait()) for event in (container.started, container.removed)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if container.main is None:
            return
        await _copy(container.main, write)
        await container.main.wait()
        await self._remove(container)  # AutoRemove

    async def _start(self, container: Container) -> None:
        if not Path(container.description["Entrypoint"][0]).exists():
            await self._remove(container)
            raise Refusal(400, f'exec: "{container.description["Entrypoint"][0]}": no such file or directory')
        workdir = Path(container.description["WorkingDir"])
        workdir.mkdir(parents=True, exist_ok=True)
        container.main = await asyncio.create_subprocess_exec(
            *OWN_NUMBERS,
            *_as_user(container.description),
            *container.description["Entrypoint"],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(container.description),
            cwd=workdir,
            start_new_session=True,
        )
        self._processes.append(container.main)
        container.started.set()

    async def _remove(self, container: Container) -> None:
        if self.containers.pop(container.id, None) is None:
            return
        while pids := marked(container.name):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        container.removed.set()
        if container.attached is not None:
            container.attached.close()

    async def _exec_start(self, call: Call, container: Container, wanted: dict[str, Any]) -> None:
        write = await self._take_over(call)
        assert container.main is not None
        process = await asyncio.create_subprocess_exec(
            *JOIN,
            "-t",
            first_child(container.main.pid),
            *_as_user(container.description | wanted),
            "setsid",
            *wanted["Cmd"],
            stdin=asyncio.subprocess.PIPE if wanted["AttachStdin"] else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(container.description, wanted),
            cwd=container.description["WorkingDir"],
            start_new_session=True,
        )
        self._processes.append(process)
        if process.stdin is not None:
            self._spawn(_feed(call.reader, process.stdin))
        await _copy(process, write)
        if self.takes_over == "chunked":
            call.writer.write(b"0\r\n\r\n")
        with suppress(OSError):
            await call.writer.drain()
            call.writer.write_eof()
        await process.wait()

    async def _take_over(self, call: Call) -> Callable[[int, bytes], None]:
        """Turn the connection into a stream; return what writes a frame to it, also when the client has gone."""
        kind = "Content-Type: application/vnd.docker.multiplexed-stream\r\n"
        if self.takes_over == "upgrade":
            head = f"HTTP/1.1 101 UPGRADED\r\n{kind}Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
        else:
            more = "Transfer-Encoding: chunked\r\n" if self.takes_over == "chunked" else ""
            head = f"HTTP/1.1 200 OK\r\n{kind}{more}\r\n"
        call.writer.write(head.encode())

        def write(kind: int, data: bytes) -> None:
            frame = bytes((kind, 0, 0, 0)) + len(data).to_bytes(4, "big") + data
            if not call.writer.transport.is_closing():
                call.writer.write(_chunk(frame) if self.takes_over == "chunked" else frame)

        return write

    async def _archive(self, call: Call) -> None:
        path = Path(call.query["path"])
        path = path.parent.resolve() / path.name  # all but the last link, as the daemon does
        try:
            status = path.lstat()
        except OSError as error:
            raise Refusal(404, f"Could not find the file {call.query['path']} in container") from error
        if call.method == "PUT":
            if not path.is_dir():
                raise Refusal(400, "extraction point is not a directory")
            await asyncio.to_thread(_extract, path.resolve(), call.body)
            await answer(call, None)
            return
        found = {"name": path.name, "size": status.st_size, "mode": _go_mode(status.st_mode), "linkTarget": ""}
        if path.is_symlink():
            found["linkTarget"] = os.path.realpath(path)
        content = io.BytesIO()
        if call.method == "GET":
            with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
                info = archive.gettarinfo(path)
                info.pax_headers = {"mtime": "1.5", "SCHILY.xattr.x": "y" * 700}
                archive.addfile(info, io.BytesIO(path.read_bytes()) if info.isreg() else None)
        described = base64.b64encode(json.dumps(found).encode()).decode()
        head = f"HTTP/1.1 200 OK\r\nX-Docker-Container-Path-Stat: {described}\r\nContent-Type: application/x-tar\r\n"
        call.writer.write(f"{head}Content-Length: {len(content.getvalue())}\r\n\r\n".encode() + content.getvalue())
        await call.writer.drain()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def answer(call: Call, value: Any, status: int = 200) -> None:
    body = b"" if value is None or call.method == "HEAD" else json.dumps(value).encode() + b"\n"
    length = "" if status == 204 else f"Content-Length: {len(body)}\r\n"
    call.writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{length}\r\n".encode() + body)
    await call.writer.drain()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", 0)))
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return bytes(body)


async def _copy(process: asyncio.subprocess.Process, write: Callable[[int, bytes], None]) -> None:
    async def one(kind: int, reader: asyncio.StreamReader | None) -> None:
        while reader is not None and (data := await reader.read(1 << 15)):
            write(kind, data)

    await asyncio.gather(one(1, process.stdout), one(2, process.stderr))


async def _feed(reader: asyncio.StreamReader, stdin: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            stdin.write(data)
            await stdin.drain()
    stdin.close()


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _environment(*descriptions: dict[str, Any]) -> dict[str, str]:
    pairs = [pair for description in descriptions for pair in description["Env"]]
    return {"PATH": "/usr/bin:/bin", "HOME": "/", **dict(pair.split("=", 1) for pair in pairs)}


def _as_user(description: dict[str, Any]) -> list[str]:
    user, _, group = description.get("User", "").partition(":")
    return ["setpriv", "--reuid", user, "--regid", group or user, "--clear-groups"] if user else []


def _go_mode(mode: int) -> int:
    kinds = {stat.S_IFDIR: 1 << 31, stat.S_IFLNK: 1 << 27, stat.S_IFIFO: 1 << 25}
    return mode & 0o777 | kinds.get(stat.S_IFMT(mode), 0) | (1 << 23 if mode & stat.S_ISUID else 0)


def _extract(folder: Path, body: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        for member in archive:
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if member.isdir():
                target.mkdir(exist_ok=True)
            else:
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target)
                target.unlink(missing_ok=True)
                source = archive.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
            if os.geteuid() == 0:
                os.chown(target, member.uid, member.gid)
            target.chmod(member.mode)
