"""Files of a container, through the archives of the Engine API."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_gym.sandbox import SandboxFileError, SandboxFileNotFoundError, SandboxStoppedError
from nemo_gym.sandbox.docker.archive import Entry, PathStat, pack
from nemo_gym.sandbox.docker.files import aiter_of
from tests.e2e.sandbox.conftest import until_output
from tests.e2e.sandbox.docker.conftest import Make
from tests.e2e.sandbox.docker.engine_stand_in import Call, StandIn
from tests.e2e.sandbox.docker.faults import hang, refuse


async def test_what_is_written_is_read_again(make: Make, tmp_path: Path) -> None:
    sandbox = await make(files={"from/spec.txt": "grüße", "bytes": b"\xff", str(tmp_path / "x"): "x"})
    data = os.urandom(3_000_001)
    await sandbox.write("deep/er/data.bin", data)
    assert await sandbox.read("deep/er/data.bin") == data
    assert await sandbox.read(f"{sandbox.workdir}/deep/er/data.bin") == data
    await sandbox.write("empty", b"")
    assert await sandbox.read("empty") == b""
    assert await sandbox.read_text("from/spec.txt") == "grüße"
    assert await sandbox.read_text("bytes") == "\ufffd"
    odd = "a b'\"$x\\\n" + "ü" * 60
    await sandbox.write(odd, "odd")
    assert await sandbox.read(odd) == b"odd"
    assert await sandbox.read(str(tmp_path / "x")) == b"x"
    await sandbox.exec(["rm", odd])
    listed = await sandbox.exec("ls -A; ls -A deep/er")
    assert listed.stdout.split() == ["bytes", "deep", "empty", "from", "data.bin"]


async def test_permissions_are_given_kept_or_ordinary(make: Make) -> None:
    sandbox = await make()
    await sandbox.write("run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    await sandbox.write("plain", "x")
    await sandbox.write("run.sh", "#!/bin/sh\necho again\n")
    assert (await sandbox.exec("stat -c %a run.sh plain; ./run.sh")).stdout == "755\n644\nagain\n"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, which those for tests are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
async def test_files_belong_to_the_user_of_the_sandbox(make: Make, open_folder: Path) -> None:
    sandbox = await make({"user": "65534"}, workdir=f"{open_folder}/work", files={"a/b": "1"})
    await sandbox.write("c/d", "2")
    owned = await sandbox.exec("id -u; stat -c %u . a a/b c c/d; echo 3 > e && rm -r a c && ls -A")
    assert owned.stdout.split() == [*["65534"] * 6, "e"]
    with pytest.raises(SandboxFileError, match="ermission denied"):
        await sandbox.write("../refused", "x")
    assert (await sandbox.exec("ls -A ..")).stdout == "work\n"


async def test_files_are_copied_in_and_out(make: Make, tmp_path: Path) -> None:
    sandbox = await make()
    local = tmp_path / "tool"
    local.write_bytes(b"#!/bin/sh\nseq 400000 > big\n")
    local.chmod(0o750)
    await sandbox.upload(local, "bin/tool")
    assert (await sandbox.exec("bin/tool")).ok
    await sandbox.download("big", tmp_path / "out" / "big")
    assert (tmp_path / "out" / "big").read_text().splitlines() == [str(number + 1) for number in range(400000)]
    with pytest.raises(SandboxFileError, match="over 10"):
        await sandbox.download("big", tmp_path / "out" / "less", max_bytes=10)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["big"]
    with pytest.raises(SandboxFileError, match="no-such"):
        await sandbox.upload(tmp_path / "no-such", "x")


async def test_what_cannot_be_read_or_written_says_why(make: Make) -> None:
    sandbox = await make()
    await sandbox.exec("mkdir folder; mkfifo pipe; ln -s missing dangling; head -c 2000 /dev/zero > big")
    for path in ("missing", "dangling", "folder/missing"):
        with pytest.raises(FileNotFoundError, match=path):
            await sandbox.read(path)
    with pytest.raises(SandboxFileNotFoundError):
        await sandbox.read("missing")
    for path, problem in (("folder", "directory"), ("pipe", "regular"), ("", "no path")):
        with pytest.raises(SandboxFileError, match=problem):
            await sandbox.read(path)
    with pytest.raises(SandboxFileError, match="2000 bytes, over 1999"):
        await sandbox.read("big", max_bytes=1999)
    assert len(await sandbox.read("big", max_bytes=2000)) == 2000
    for path, problem in (("folder", "directory"), ("big/below", "(?i)not a directory|file exists")):
        with pytest.raises(SandboxFileError, match=problem):
            await sandbox.write(path, b"x" * 3_000_000)


async def test_links_are_followed_and_hard_links_not_written_through(make: Make) -> None:
    sandbox = await make(files={"real/file": "old", "one": "1"})
    await sandbox.exec('ln -s real alias; ln -s "$PWD/real/file" direct; ln one two')
    await sandbox.write("alias/file", "new")
    assert await sandbox.read("direct") == b"new"
    await sandbox.write("direct", "newer")
    assert (await sandbox.exec("cat real/file; test -h direct")).stdout == "newer"
    await sandbox.write("two", "2")
    assert await sandbox.read("one") == b"1"


async def test_a_write_that_is_cancelled_or_refused_leaves_the_old_file(make: Make, daemon: StandIn) -> None:
    sandbox = await make(files={"file": "old"})
    reading = asyncio.Event()

    async def slow(call: Call) -> bool:
        reading.set()
        return await hang(call)

    daemon.faults["PUT .*"] = slow
    task = asyncio.create_task(sandbox.write("file", bytes(3_000_000)))
    await reading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    daemon.faults["PUT .*"] = refuse(403, "container rootfs is marked read-only")
    with pytest.raises(SandboxFileError, match=r"file: .*read-only"):
        await sandbox.write("file", "new")
    await until_output(sandbox, "ls -A", "file\n")
    assert await sandbox.read("file") == b"old"


async def test_broken_archives_are_errors(make: Make, daemon: StandIn) -> None:
    sandbox = await make(files={"file": "old"})
    stat = "X-Docker-Container-Path-Stat: eyJzaXplIjo0LCJtb2RlIjo0MjB9\r\n"  # size 4, mode 0644

    def reply(headers: str, body: bytes) -> None:
        async def fault(call: Call) -> bool:
            call.writer.write(f"HTTP/1.1 200 OK\r\n{headers}\r\n".encode() + body)
            await call.writer.drain()
            return True

        daemon.faults["GET .*archive"] = fault

    header = Entry("file", 4, 0o644, (0, 0)).header()
    for headers, body, problem in (
        ("", b"", "Path-Stat"),
        (stat, b"", "broke off"),
        (stat, b"x" * 600, "no archive"),
        (stat, header + b"12", "broke off"),
        (stat, Entry("folder", None, 0o755, (0, 0)).header(), "instead of a file"),
    ):
        reply(headers, body)
        with pytest.raises(SandboxFileError, match=f"file: .*{problem}"):
            await sandbox.read("file")
    reply(stat, Entry("file", 6, 0o644, (0, 0)).header() + b"123456")
    with pytest.raises(SandboxFileError, match="over 5"):
        await sandbox.read("file", max_bytes=5)
    daemon.faults = {"HEAD .*": refuse(200, "")}
    with pytest.raises(SandboxFileError, match=r"file: .*Path-Stat"):
        await sandbox.write("file", "new")


async def test_files_of_a_container_that_is_gone(make: Make, daemon: StandIn) -> None:
    sandbox = await make(files={"file": "old"})
    daemon.faults[".*archive"] = refuse(404, f"No such container: {sandbox.handle.id}")
    with pytest.raises(SandboxStoppedError, match="gone"):
        await sandbox.read("file")
    await sandbox.stop()
    for call in (sandbox.read("file"), sandbox.write("file", b"")):
        with pytest.raises(SandboxStoppedError, match="stopped"):
            await call


async def test_an_archive_says_when_the_file_changed_while_it_was_packed() -> None:
    for data in (b"12345", b"123"):
        with pytest.raises(SandboxFileError, match="changed"):
            _ = [part async for part in pack(Entry("file", 4, 0o644, (0, 0)), aiter_of([data]))]


def test_what_the_daemon_says_of_a_path_is_read_as_go_writes_it() -> None:
    assert PathStat(0, 1 << 23 | 0o755, "").permissions == 0o4755
    assert PathStat(0, 1 << 31 | 0o755, "").is_directory
    assert PathStat(0, 1 << 27 | 0o777, "/x").is_link
    assert not PathStat(0, 1 << 26 | 1 << 21 | 0o666, "").is_regular
