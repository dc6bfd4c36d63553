"""Drives the server over HTTP, in this process, with real sandboxes."""

import asyncio
import importlib
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx2
import pytest

from nemo_gym.server_utils import ServerClient
from resources_servers.swe_rebench.app import SweRebenchResourcesServer, SweRebenchResourcesServerConfig
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
from resources_servers.swe_rebench.tools import TOOLS

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


INSTRUCTION = re.compile(r"^\d+\. (.*)$", re.MULTILINE)


async def follow_instructions(client: httpx2.AsyncClient, statement: str) -> None:
    for match in INSTRUCTION.finditer(statement):
        words = re.findall(r"`([^`]+)`", match[1])
        if match[1].startswith("In "):
            await call(client, "edit_file", path=words[0], old=words[1], new=words[2])
        elif match[1].startswith("Create "):
            block = statement[match.end() :].split("   ```\n")[1]
            content = "".join(line.removeprefix("   ") for line in block.splitlines(keepends=True))
            await call(client, "write_file", path=words[0], content=content)
        else:
            commands = {"Delete": "rm -- {}", "Rename": "mv -- {} {}", "Make": "chmod +x -- {}", "Run": "{}"}
            command = commands[match[1].split()[0]].format(*words)
            assert (await call(client, "run_command", command=command))["return_code"] == 0


async def test_every_example_row_is_solved_by_following_its_instructions(build: Build, tmp_path: Path) -> None:
    async with build() as app:

        async def solve(row: dict[str, Any]) -> Any:
            client = await seeded(app, row)
            await follow_instructions(client, row["problem_statement"])
            return await verify(client, row)

        verdicts = await asyncio.gather(*(solve(row) for row in ROWS.values()))
        assert sandboxes(tmp_path) == []
    for row, verdict in zip(ROWS.values(), verdicts, strict=True):
        assert (verdict["reward"], verdict["resolved"]) == (1.0, True), verdict["reason"]
        assert verdict["patch_applied"]
        assert verdict["evaluation_completed"]
        assert verdict["reason"] == f"all {len(row['FAIL_TO_PASS'] + row['PASS_TO_PASS'])} tests passed"
        assert set(verdict["fail_to_pass"]) == set(row["FAIL_TO_PASS"])
        assert set(verdict["pass_to_pass"].values()) == {"passed"}
        assert set(verdict["timings"]) == {"extract_s", "start_s", "apply_s", "test_s"}
        assert verdict["attempts"] == 1
        assert len(verdict["output"]) < 4_100
        assert verdict["model_patch"].startswith("diff --git ")
        assert verdict["golden_patch_resolves"] is row["golden_patch_resolves"]
    files = dict(zip(ROWS, (verdict["patch_files"] for verdict in verdicts), strict=True))
    assert files["scales"] == ["scales/__init__.py", "scales/temperature.py", "scales/temprature.py"]
    assert files["palette"] == ["assets/palette.bin"]


async def test_work_that_does_not_help_is_judged_with_the_reason(build: Build) -> None:
    async with build(test_timeout_s=10) as app:

        async def verdict_of(name: str, command: str) -> Any:
            client = await seeded(app, ROWS[name])
            await call(client, "run_command", command=command)
            return await verify(client, ROWS[name])

        nothing, cheat, hang, crash, flood = await asyncio.gather(
            verdict_of("tally", "true"),
            verdict_of("launch", "printf '#!/bin/sh\\necho \"--- PASS: TestDefaultPort (0.00s)\"\\n' > tests/run.sh"),
            verdict_of("pages", "echo '# nothing' >> pages/reader.py"),
            verdict_of("palette", "echo 'import os; os._exit(3)' > palette.py"),
            verdict_of("report", "true"),
        )
    assert {(it["reward"], it["evaluation_completed"]) for it in (nothing, cheat, hang, crash, flood)} == {(0.0, True)}
    assert nothing["reason"].startswith("2 of 3 tests did not pass: test_both_ends_count (tests.test_ranges")
    assert nothing["fail_to_pass"][ROWS["tally"]["FAIL_TO_PASS"][0]] == "failed"
    assert nothing["model_patch"] == ""
    assert cheat["model_patch"] == ""
    assert cheat["fail_to_pass"]["TestDefaultPort"] == "failed"
    assert hang["reason"].startswith("tests timed out after 10 s; with the reference solution the tests pass")
    assert hang["attempts"] == 1
    assert crash["reason"].startswith("the log reports no test; the test command ended with 3; with the reference")
    assert crash["attempts"] == 2
    assert "characters left out" in flood["output"]
    assert flood["reason"].startswith("2 of 4 tests did not pass")


async def test_the_datasets_own_patches_are_judged_when_asked_for(build: Build) -> None:
    async with build(is_verifying_golden_patch=True, max_judgings=4) as app:
        seeded_client = await seeded(app, ROWS["tally"])
        await call(seeded_client, "run_command", command="rm -rf tally")
        clients = {name: client_of(app) for name in ("money", "launch", "wording")} | {"tally": seeded_client}
        verdicts = await asyncio.gather(*(verify(client, ROWS[name]) for name, client in clients.items()))
    found = {name: verdict["reward"] for name, verdict in zip(clients, verdicts, strict=True)}
    assert found == {"money": 0.0, "launch": 1.0, "wording": 1.0, "tally": 1.0}
    assert verdicts[0]["reason"] == "1 of 3 tests did not pass: money::half (failed)"
    assert verdicts[0]["evaluation_completed"]


async def test_a_patch_that_does_not_apply_is_judged(build: Build) -> None:
    async with build(is_verifying_golden_patch=True) as app:
        row = {**ROWS["tally"], "patch": ROWS["pantry"]["patch"]}
        verdict = await verify(client_of(app), row)
    assert (verdict["reward"], verdict["patch_applied"], verdict["evaluation_completed"]) == (0.0, False, True)
    assert "the patch does not apply: error: pantry/stock.py: No such file" in verdict["reason"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"test_patch": ROWS["pantry"]["test_patch"]}, "the row's own tests don't apply to its base commit"),
        ({"install_config": {"test_cmd": "true", "log_parser": "go"}}, "the reference solution did not pass either"),
        (
            {"install_config": {"install": "exit 7", "test_cmd": "true", "log_parser": "go"}},
            "the installation ended with 7",
        ),
    ],
)
async def test_what_can_not_be_judged_is_no_reward(build: Build, changes: dict[str, Any], reason: str) -> None:
    async with build() as app:
        client = await seeded(app, {**ROWS["tally"], **changes})
        await call(client, "write_file", path="more.txt", content="x")
        reply = await client.post("/verify", json={**ROWS["tally"], **changes, "response": RESPONSE})
        assert reply.status_code == 503
        assert "example__tally-1 could not be judged" in reply.json()["detail"]
        assert reason in reply.json()["detail"]


async def test_the_tools_work_in_the_repository(build: Build) -> None:
    async with build(max_command_output_bytes=1000, max_read_chars=50) as app:
        client = await seeded(app, ROWS["tally"])
        listed = await call(client, "list_files")
        assert listed == {
            "files": [
                ".gitignore",
                "README.md",
                "tally/__init__.py",
                "tally/ranges.py",
                "tests/__init__.py",
                "tests/test_ranges.py",
            ],
            "truncated": False,
        }
        assert (await call(client, "list_files", path="tally/"))["files"] == ["tally/__init__.py", "tally/ranges.py"]
        assert await call(client, "read_file", path="README.md", start=3) == {
            "content": "Sums of whole numbers.\n",
            "lines": 3,
            "truncated": False,
        }
        assert (await call(client, "read_file", path="tally/ranges.py", end=4))["truncated"]
        await call(client, "write_file", path="new/deep/ü.txt", content="one\ntwo\ntwo\n")
        assert (await call(client, "read_file", path="new/deep/ü.txt", start=2, end=2))["content"] == "two\n"
        ran = await call(client, "run_command", command="cat new/deep/*; echo oops >&2; exit 3")
        assert (ran["return_code"], ran["stdout"], ran["stderr"]) == (3, "one\ntwo\ntwo\n", "oops\n")
        slow = await call(client, "run_command", command="echo begun; sleep 60", timeout_s=0.5)
        assert (slow["timed_out"], slow["stdout"]) == (True, "begun\n")
        assert (await call(client, "run_command", command="yes | head -c 100000"))["truncated"]
        for tool, arguments, status, detail in [
            ("edit_file", {"path": "new/deep/ü.txt", "old": "two", "new": "2"}, 400, "holds the old text 2 times"),
            ("edit_file", {"path": "new/deep/ü.txt", "old": "three", "new": "3"}, 400, "does not hold the old text"),
            ("read_file", {"path": "none.txt"}, 404, "none.txt"),
            ("read_file", {"path": "tally"}, 400, "tally"),
            ("read_file", {"path": "a\0b"}, 400, "NUL"),
            ("write_file", {"path": "tally", "content": ""}, 400, "tally"),
            ("list_files", {"path": "none"}, 400, "none"),
            ("run_command", {"command": ""}, 422, "at least 1 character"),
            ("read_file", {"path": "README.md", "start": 0}, 422, "greater than or equal to 1"),
            ("read_file", {"path": "README.md", "first": 1}, 422, "Extra inputs"),
        ]:
            reply = await client.post(f"/{tool}", json=arguments)
            assert (reply.status_code, detail in reply.text) == (status, True), reply.text


async def test_the_solution_is_nowhere_in_the_sandbox(build: Build) -> None:
    async with build() as app:
        client = await seeded(app, ROWS["tally"])
        looked = await call(
            client,
            "run_command",
            command="git log --all --oneline | wc -l; git cat-file --batch-all-objects --batch-check | grep -c commit; "
            "git cat-file --batch-all-objects --batch='x%(objectname)' | grep -ac 'last + 1\\|both_ends_count'; "
            "grep -rc 'last + 1' tally; env",
        )
        lines = looked["stdout"].splitlines()
        assert lines[:4] == ["2", "2", "0", "tally/__init__.py:0"]
        assert "SECRET" not in looked["stdout"]


async def test_a_session_without_a_sandbox_is_refused(build: Build) -> None:
    async with build() as app:
        row = ROWS["tally"]
        bodies = {
            "run_command": {"command": "true"},
            "read_file": {"path": "a"},
            "write_file": {"path": "a", "content": ""},
            "edit_file": {"path": "a", "old": "a", "new": "b"},
            "list_files": {},
            "verify": {**row, "response": RESPONSE},
        }
        verified = await seeded(app, row)
        await verify(verified, row)
        for client in (client_of(app), verified):
            for path, body in bodies.items():
                reply = await client.post(f"/{path}", json=body)
                assert (reply.status_code, "seed_session" in reply.json()["detail"]) == (410, True)


async def test_a_lost_sandbox_ends_the_session_without_a_reward(build: Build, tmp_path: Path) -> None:
    async with build() as app:
        client = await seeded(app, ROWS["tally"])
        other = await seeded(app, ROWS["launch"])
        reply = await other.post("/verify", json={**ROWS["tally"], "response": RESPONSE})
        assert (reply.status_code, "seeded with example__launch-1" in reply.text) == (409, True)
        # The command's parent is its supervisor, whose parent serves the sandbox.
        kill = {"command": "kill -9 $(cut -d ' ' -f 4 /proc/$PPID/stat); sleep 60"}
        work = {**ROWS["tally"], "response": RESPONSE}
        for path, body in (("run_command", kill), ("read_file", {"path": "README.md"}), ("verify", work)):
            reply = await client.post(f"/{path}", json=body)
            assert (reply.status_code, "is lost" in reply.text) == (410, True), reply.text
        assert (await verify(await seeded(app, ROWS["tally"]), ROWS["tally"]))["reward"] == 0.0


async def test_a_second_seed_replaces_the_sandbox_and_the_limit_holds(build: Build, tmp_path: Path) -> None:
    async with build(max_sandboxes=1, sandbox_wait_s=0.2) as app:
        client = await seeded(app, ROWS["tally"])
        await call(client, "write_file", path="more.txt", content="x")
        reply = await client.post("/seed_session", json=ROWS["launch"])
        assert reply.status_code == 200
        assert "bin/launch.sh" in (await call(client, "list_files"))["files"]
        assert len(sandboxes(tmp_path)) == 1
        reply = await client_of(app).post("/seed_session", json=ROWS["tally"])
        assert (reply.status_code, "all 1 sandboxes" in reply.text) == (503, True)
        bad = {**ROWS["launch"], "base_commit": "f" * 40}
        reply = await client.post("/seed_session", json=bad)
        assert (reply.status_code, "has no commit" in reply.text) == (503, True)
        assert sandboxes(tmp_path) == []
        assert (await client.post("/list_files", json={})).status_code == 410
        await seeded(app, ROWS["tally"])


async def test_a_session_that_is_closed_has_no_sandbox_any_more(build: Build, tmp_path: Path) -> None:
    async with build(session_end={}) as app:
        client = await seeded(app, ROWS["tally"])
        assert len(sandboxes(tmp_path)) == 1
        assert (await client.post("/close_session")).status_code == 200
        assert sandboxes(tmp_path) == []
        assert (await client.post("/list_files", json={})).status_code == 410


async def test_two_seeds_of_one_session_at_once_leave_one_sandbox(build: Build, tmp_path: Path) -> None:
    async with build(max_sandboxes=2) as app:
        client = client_of(app)
        assert (await client.post("/list_files", json={})).status_code == 410
        replies = await asyncio.gather(*(client.post("/seed_session", json=ROWS["tally"]) for _ in range(2)))
        assert [reply.status_code for reply in replies] == [200, 200]
        assert len(sandboxes(tmp_path)) == 1
        assert (await verify(client, ROWS["tally"]))["evaluation_completed"]


async def test_a_seed_that_is_given_up_leaves_no_sandbox(build: Build, tmp_path: Path) -> None:
    async with build(max_sandboxes=1) as app:
        await (await seeded(app, ROWS["tally"])).post("/verify", json={**ROWS["tally"], "response": RESPONSE})
        for delay in (0.01, 0.03, 0.06, 0.1):
            task = asyncio.create_task(client_of(app).post("/seed_session", json=ROWS["tally"]))
            await asyncio.wait([task], timeout=delay)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        assert await asyncio.wait_for(seeded(app, ROWS["tally"]), 60)


async def test_an_agents_large_patch_is_judged_nought(build: Build) -> None:
    async with build(max_patch_bytes=1000) as app:
        client = await seeded(app, ROWS["tally"])
        await call(client, "run_command", command="head -c 5000 /dev/urandom > big.bin; rm -rf .git")
        verdict = await verify(client, ROWS["tally"])
    assert (verdict["reward"], verdict["evaluation_completed"], verdict["model_patch"]) == (0.0, True, None)
    assert "the limit is 1000" in verdict["reason"]


async def test_the_reply_to_a_seed_lists_the_tools_for_agents_that_offer_them(build: Build) -> None:
    async with build() as app:
        reply = await client_of(app).post("/seed_session", json=ROWS["tally"])
        assert reply.json()["tools"] == TOOLS


def test_rows_offer_the_tools_that_the_server_has() -> None:
    config = SweRebenchResourcesServerConfig(host="", port=0, entrypoint="", name="swe")
    server = SweRebenchResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
    requests = importlib.import_module("resources_servers.swe_rebench.tools")
    paths = {getattr(route, "path", "") for route in server.setup_webserver().routes}
    for tool in TOOLS:
        assert f"/{tool['name']}" in paths
        fields = getattr(requests, "".join(part.title() for part in tool["name"].split("_")) + "Request").model_fields
        assert set(tool["parameters"]["properties"]) == set(fields)
        assert tool["parameters"]["required"] == [name for name, field in fields.items() if field.is_required()]
