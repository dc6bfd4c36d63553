"""Files of a local sandbox, also where a program in it set traps."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_gym.sandbox import AsyncSandbox, SandboxFileError, SandboxFileNotFoundError
from tests.e2e.sandbox.conftest import Start, until_output


async def test_what_is_written_is_read_again(make: Start, tmp_path: Path) -> None:
    sandbox: AsyncSandbox = await make()
    data = os.urandom(3_000_001)
    await sandbox.write("deep/er/data.bin", data)
    assert await sandbox.read("deep/er/data.bin") == data
    assert await sandbox.read(f"{sandbox.workdir}/deep/er/data.bin") == data
    await sandbox.write("empty", b"")
    assert await sandbox.read("empty") == b""
    await sandbox.write("text", "grüße")
    assert await sandbox.read_text("text") == "grüße"
    await sandbox.write("broken", b"a\xff")
    assert await sandbox.read_text("broken") == "a\ufffd"
    assert (await sandbox.exec("ls -A; ls -A deep/er")).stdout.split() == [
        *("broken", "deep", "empty", "text"),
        "data.bin",
    ]


async def test_permissions_are_given_kept_or_ordinary(make: Start) -> None:
    sandbox: AsyncSandbox = await make()
    await sandbox.write("run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    await sandbox.write("plain", "x")
    await sandbox.write("run.sh", "#!/bin/sh\necho again\n")
    assert (await sandbox.exec("stat -c %a run.sh plain; ./run.sh")).stdout == "755\n644\nagain\n"


async def test_files_are_copied_in_and_out(make: Start, tmp_path: Path) -> None:
    sandbox: AsyncSandbox = await make()
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
    with pytest.raises(SandboxFileError, match="regular"):
        await sandbox.upload(tmp_path, "x")


async def test_what_cannot_be_read_says_why(make: Start) -> None:
    sandbox: AsyncSandbox = await make()
    await sandbox.exec(
        "mkdir folder; mkfifo pipe; ln -s loop loop; ln -s missing dangling; head -c 2000 /dev/zero > big"
    )
    for path in ("missing", "dangling", "folder/missing"):
        with pytest.raises(FileNotFoundError, match=path):
            await sandbox.read(path)
    with pytest.raises(SandboxFileNotFoundError):
        await sandbox.read("missing")
    for path, problem in (("folder", "directory"), ("pipe", "regular"), ("loop", "symbolic links"), ("", "no path")):
        with pytest.raises(SandboxFileError, match=problem):
            await sandbox.read(path)
    with pytest.raises(SandboxFileError, match="2000 bytes, over 1999"):
        await sandbox.read("big", max_bytes=1999)
    assert len(await sandbox.read("big", max_bytes=2000)) == 2000
    for path, problem in (("folder", "directory"), ("big/below", "Not a directory")):
        with pytest.raises(SandboxFileError, match=problem):
            await sandbox.write(path, b"x" * 3_000_000)


async def test_a_link_within_the_sandbox_is_followed(make: Start) -> None:
    sandbox: AsyncSandbox = await make(files={"real/file": "old"})
    await sandbox.exec('ln -s real alias; ln -s "$PWD/real/file" direct')
    await sandbox.write("alias/file", "new")
    assert await sandbox.read("direct") == b"new"
    await sandbox.write("direct", "newer")
    assert (await sandbox.exec("cat real/file; test -h direct")).stdout == "newer"


async def test_no_trap_leads_the_worker_to_a_file_of_the_host(make: Start, isolation: str, tmp_path: Path) -> None:
    sandbox: AsyncSandbox = await make()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    await sandbox.exec(f"ln -s {outside}/secret file; ln -s {outside} folder; ln -s {outside}/new new; mkdir -p a")
    up = "../" * 20
    for path in ("file", "folder/secret", str(outside / "secret"), f"{up}{outside}/secret"):
        with pytest.raises(SandboxFileError):
            await sandbox.read(path)
    for path in ("file", "folder/secret", "folder/planted", "new", str(outside / "planted"), f"a/{up}{outside}/p"):
        # In bubblewrap the same path may be one of the sandbox's own.
        with pytest.raises(SandboxFileError) if isolation == "none" else suppress(SandboxFileError):
            await sandbox.write(path, "overwritten")
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "secret"}


async def test_a_hard_link_is_not_written_through(make: Start) -> None:
    sandbox: AsyncSandbox = await make(files={"one": "1"})
    await sandbox.exec("ln one two")
    await sandbox.write("two", "2")
    assert await sandbox.read("one") == b"1"


async def test_links_that_change_while_the_worker_reads_and_writes_lead_nowhere(make: Start, tmp_path: Path) -> None:
    sandbox: AsyncSandbox = await make()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("secret")
    await sandbox.exec("mkdir inside; echo mine > inside/file")
    swap = f"while :; do ln -sfn inside at; ln -sfn {outside} at; done"
    swapper = asyncio.create_task(sandbox.exec(swap, timeout_s=0.5))
    while not swapper.done():
        try:
            assert await sandbox.read("at/file") != b"secret"
            await sandbox.write("at/file", "mine")
        except SandboxFileError:
            continue
    await swapper
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"file": "secret"}


async def test_a_cancelled_write_leaves_the_old_file(make: Start) -> None:
    sandbox: AsyncSandbox = await make(files={"file": "old"})
    task = asyncio.create_task(sandbox.write("file", bytes(200_000_000)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_output(sandbox, "ls -A", "file\n")
    assert await sandbox.read("file") == b"old"
