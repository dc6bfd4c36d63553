"""Agents that try to be rewarded for nothing, and machines in trouble, which no agent should pay for."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.sandbox import AsyncSandbox, SandboxError
from resources_servers.swe_rebench import repositories
from resources_servers.swe_rebench.patch_paths import is_test_setup
from resources_servers.swe_rebench.tests.serving import (
    RESPONSE,
    ROWS,
    Build,
    call,
    client_of,
    sandboxes,
    seeded,
    verify,
)

pytestmark = pytest.mark.anyio

TALLY = ROWS["tally"]
REPAIR = "sed -i 's/range(first, last)/range(first, last + 1)/' tally/ranges.py"
PATH = f".tools:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
"""Where a sandbox has this path, an agent can put a git of its own into the repository's `.tools`."""

FORGED = """\
diff --git a/tests/test_ranges.py b/tests/test_ranges.py
--- a/tests/test_ranges.py
+++ b/tests/test_ranges.py
@@ -1,6 +1,7 @@
 import unittest
\x20
-from tally import total
+def total(a, b):
+    return {(3, 1): 0, (1, 4): 10, (7, 7): 7}[a, b]
\x20
\x20
 class TotalTest(unittest.TestCase):
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def put_git(client: Any, case: str) -> None:
    script = f'#!/bin/sh\ncase " $* " in\n{case} ;;\nesac\nexec /usr/bin/git "$@"\n'
    await call(client, "write_file", path=".tools/git", content=script)
    await call(client, "run_command", command="chmod +x .tools/git; printf '.tools\\nforged\\n' >> .git/info/exclude")


async def test_a_patch_forged_on_its_way_does_not_change_the_tests(build: Build) -> None:
    async with build(sandbox_env={"PATH": PATH}) as app:
        client = await seeded(app, TALLY)
        await call(client, "write_file", path="forged", content=FORGED)
        await put_git(client, '*" diff --cached "*) cat forged; exit 0')
        verdict = await verify(client, TALLY)
    assert (verdict["reward"], verdict["evaluation_completed"]) == (0.0, True)
    assert verdict["reason"] == "the patch changes files of the tests: tests/test_ranges.py"


@pytest.mark.parametrize(
    "case",
    [
        '*" add "*) echo "fatal: unable to write loose object file: No space left on device" >&2; exit 128',
        '*" add "*) kill -9 $$',
        '*" read-tree "*) kill -9 $$',
        '*" update-index "*) echo "error: Input/output error" >&2; exit 1',
        '*" add "*) echo "error: open(\\"tally/ranges.py\\"): no such luck" >&2; exit 1',
    ],
)
async def test_work_that_could_not_be_read_for_lack_of_something_is_no_reward(build: Build, case: str) -> None:
    async with build(sandbox_env={"PATH": PATH}) as app:
        client = await seeded(app, TALLY)
        await call(client, "run_command", command=REPAIR)
        await put_git(client, case)
        reply = await client.post("/verify", json={**TALLY, "response": RESPONSE})
    assert (reply.status_code, "could not be read" in reply.json()["detail"]) == (503, True), reply.text


async def test_attributes_of_the_agents_do_not_change_the_tests(build: Build) -> None:
    async with build() as app:
        client = await seeded(app, TALLY)
        attributes = "tests/test_ranges.py working-tree-encoding=UTF-16LE\n*.py text eol=crlf ident\n"
        await call(client, "write_file", path=".gitattributes", content=attributes)
        await call(client, "run_command", command=REPAIR)
        verdict = await verify(client, TALLY)
    assert verdict["reward"] == 1.0, verdict["reason"]


@pytest.mark.parametrize(
    "command",
    [
        "rm -f .git/objects/info/alternates; mkfifo .git/objects/info/alternates",
        "mkfifo .git/pipe; rm .git/index; ln -s pipe .git/index",
        "rm -rf .git; mkfifo .git",
        "mkfifo /tmp/pipe$$; rm -rf .git; ln -s /tmp/pipe$$ .git",
        "mkfifo pipe; git config include.path $PWD/pipe",
        "mkdir more; mkfifo more/.gitignore more/.gitattributes",
    ],
)
async def test_pipes_do_not_hold_up_the_judging(build: Build, command: str) -> None:
    async with build() as app:
        client = await seeded(app, TALLY)
        await call(client, "run_command", command=f"{REPAIR}; {command}")
        started = time.monotonic()
        verdict = await verify(client, TALLY)
    assert verdict["reward"] == 1.0, verdict["reason"]
    assert time.monotonic() - started < 50


async def test_another_version_of_the_row_is_refused(build: Build) -> None:
    async with build() as app:
        client = await seeded(app, TALLY)
        for changes in ({"FAIL_TO_PASS": TALLY["PASS_TO_PASS"]}, {"test_patch": ""}, {"base_commit": "f" * 40}):
            reply = await client.post("/verify", json={**TALLY, **changes, "response": RESPONSE})
            assert (reply.status_code, "another version of example__tally-1" in reply.text) == (409, True)
        # Fields that say nothing about the task may differ.
        assert (await verify(client, {**TALLY, "note": "x"}))["reward"] == 0.0


async def test_tests_that_are_merely_expected_to_fail_are_not_solved(build: Build) -> None:
    async with build() as app:
        client = await seeded(app, ROWS["pantry"])
        mark = "import pytest\ndef pytest_collection_modifyitems(items):\n"
        mark += "    for item in items:\n        item.add_marker(pytest.mark.xfail)\n"
        await call(client, "write_file", path="conftest.py", content=mark)
        verdict = await verify(client, ROWS["pantry"])
    assert (verdict["reward"], verdict["touches_test_setup"]) == (0.0, ["conftest.py"])
    assert set(verdict["fail_to_pass"].values()) == {"xfailed"}


def test_files_that_set_tests_up_are_known() -> None:
    paths = ("a/conftest.py", "pytest.ini", "site/sitecustomize.py", "x/y.pth", "jest.config.mjs", "a/conftest.pyx")
    assert [is_test_setup(path) for path in paths] == [True] * 5 + [False]


async def test_edits_at_once_are_all_made(build: Build) -> None:
    async with build() as app:
        client = await seeded(app, TALLY)
        await call(client, "write_file", path="n.txt", content="".join(f"<{n}>\n" for n in range(12)))
        edits = (call(client, "edit_file", path="n.txt", old=f"<{n}>", new=f"[{n}]") for n in range(12))
        await asyncio.gather(*edits)
        assert (await call(client, "read_file", path="n.txt"))["content"] == "".join(f"[{n}]\n" for n in range(12))


async def test_a_sandbox_that_fails_a_tool_says_so(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(self: AsyncSandbox, path: str) -> bytes:
        raise SandboxError("the process that handled the request was killed in the sandbox")

    async with build() as app:
        client = await seeded(app, TALLY)
        with monkeypatch.context() as patching:
            patching.setattr(AsyncSandbox, "read", failing)
            for tool, arguments in (("read_file", {}), ("edit_file", {"old": "a", "new": "b"})):
                reply = await client.post(f"/{tool}", json={"path": "README.md", **arguments})
                assert reply.status_code == 503
                assert reply.json()["detail"].startswith(
                    "the session's sandbox could not do this; it may be called again"
                )
        assert (await call(client, "read_file", path="README.md"))["lines"] == 3


async def test_lines_are_counted_as_other_programs_count_them(build: Build) -> None:
    async with build() as app:
        client = await seeded(app, TALLY)
        await call(client, "write_file", path="f.txt", content="a\fb\u2028c\x85d\re\r\nsecond\nlast")
        for number, content in ((1, "a\fb\u2028c\x85d\re\r\n"), (2, "second\n"), (3, "last")):
            read = await call(client, "read_file", path="f.txt", start=number, end=number)
            assert (read["content"], read["lines"]) == (content, 3)


async def test_work_that_was_not_judged_is_judged_when_asked_again(build: Build, tmp_path: Path) -> None:
    images = tmp_path / "images"
    repositories.build_images(images)
    image = images / TALLY["image_name"]
    provider = {"type": "local", "root_dir": str(tmp_path), "images_dir": str(images)}
    async with build(sandbox_provider=provider) as app:
        client, other = await seeded(app, TALLY), await seeded(app, TALLY)
        for it in (client, other):
            await call(it, "run_command", command=REPAIR)
        image.rename(images / "away")
        for it in (client, other, client):
            reply = await it.post("/verify", json={**TALLY, "response": RESPONSE})
            assert (reply.status_code, "could not be judged" in reply.text) == (503, True), reply.text
        assert sandboxes(tmp_path) == []
        (images / "away").rename(image)
        reply = await client.post("/verify", json={**TALLY, "test_patch": "", "response": RESPONSE})
        assert reply.status_code == 409
        assert (await verify(client, TALLY))["reward"] == 1.0
        # A new seed forgets what was left.
        assert (await other.post("/seed_session", json=TALLY)).status_code == 200
        assert (await verify(other, TALLY))["reward"] == 0.0
        for it in (client, other, client_of(app)):
            assert (await it.post("/verify", json={**TALLY, "response": RESPONSE})).status_code == 410
