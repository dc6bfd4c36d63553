"""Lists of changes to files, carried out through tools that really edit: stand-ins over a folder."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from nemo_gym.paths import PARENT_DIR
from nemo_gym.server_utils import ServerClient
from resources_servers.swe_rebench.repositories import build_repository, example_repositories
from responses_api_models.pattern_model.app import PatternModel, PatternModelConfig


def tool(name: str, *arguments: str, **optional: Any) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments} | optional
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "name": name, "parameters": schema}


TOOLS = [
    tool("list_files", path={"type": "string"}),
    tool("read_file", "path"),
    tool("write_file", "path", "content"),
    tool("edit_file", "path", "old", "new"),
    tool("run_command", "command", timeout_s={"type": "number"}),
]


class Folder:
    """The tools, by their bare names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        handler: Callable[..., dict[str, Any]] = getattr(self, name.rpartition("__")[2])
        return handler(**arguments)

    def edit_file(self, path: str, old: str, new: str) -> dict[str, Any]:
        text = (self.path / path).read_text(encoding="utf-8")
        if text.count(old) != 1:
            return {"error": f"'{old}' occurs {text.count(old)} times in {path}", "status": 400}
        (self.path / path).write_text(text.replace(old, new), encoding="utf-8")
        return {"replaced": 1}

    def write_file(self, path: str, content: str) -> dict[str, Any]:
        (self.path / path).write_text(content, encoding="utf-8")
        return {"written": len(content)}

    def run_command(self, command: str) -> dict[str, Any]:
        done = subprocess.run(["sh", "-c", command], cwd=self.path, capture_output=True, text=True, check=False)
        return {"return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr, "timed_out": False}


@pytest.fixture(scope="module")
def client() -> TestClient:
    config = PatternModelConfig(host="", port=0, entrypoint="", name="policy_model")
    return TestClient(PatternModel(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "shop.py").write_text("def total(a, b):\n    return a - b\n\n\ndef tax(x):\n    return x - 1\n")
    (tmp_path / "run.sh").write_text("echo ran\n")
    return Folder(tmp_path)


def changes(*items: str) -> str:
    return "\n".join(["Repair it.", "", "## What to change", "", *(f"{at}. {it}" for at, it in enumerate(items, 1))])


def work(client: TestClient, folder: Folder, instruction: str, tools: list[dict[str, Any]]) -> tuple[list[Any], str]:
    """Let the model work until it is done; return its calls and its last words."""
    items: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    made: list[Any] = []
    while True:
        reply = client.post("/v1/responses", json={"input": items, "tools": tools})
        assert reply.status_code == 200, reply.text
        (item,) = reply.json()["output"]
        if item["type"] == "message":
            return made, item["content"][0]["text"]
        arguments = json.loads(item["arguments"])
        made.append((item["name"], arguments))
        result = folder.call(item["name"], arguments)
        items += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": json.dumps(result)}]


def test_text_is_replaced_with_its_blanks(client: TestClient, folder: Folder) -> None:
    instruction = changes("In `shop.py` replace `    return a - b` by `    return a + b  # sum`.")
    made, text = work(client, folder, instruction, TOOLS)
    expected = {"path": "shop.py", "old": "    return a - b", "new": "    return a + b  # sum"}
    assert made == [("edit_file", expected)]
    assert text == "Done. Changes made: 1."
    assert "    return a + b  # sum\n" in (folder.path / "shop.py").read_text()


def test_every_kind_of_change_is_made_in_order(client: TestClient, folder: Folder) -> None:
    new_file = "Create the file `new.py` with this content:\n   ```\n   def f():\n       return 1\n\n   # `end`\n   ```"
    instruction = changes(
        new_file,
        "In `new.py` replace `return 1` by ``.",
        "Rename the file `new.py` to `newer.py`.",
        "Make the file `run.sh` executable.",
        "Run the command `./run.sh > said && mkdir -p 'a b'`.",
        "Delete the file `shop.py`.",
    )
    made, text = work(client, folder, instruction, TOOLS)
    assert [name for name, _ in made] == ["write_file", "edit_file", *["run_command"] * 4]
    assert made[0][1]["content"] == "def f():\n    return 1\n\n# `end`\n"
    assert text == "Done. Changes made: 6."
    assert sorted(path.name for path in folder.path.iterdir()) == ["a b", "newer.py", "run.sh", "said"]
    assert (folder.path / "newer.py").read_text() == "def f():\n    \n\n# `end`\n"
    assert (folder.path / "said").read_text() == "ran\n"


@pytest.mark.parametrize("parallel", [True, False])
def test_changes_come_one_by_one_also_where_parallel_calls_are_allowed(client: TestClient, parallel: bool) -> None:
    instruction = changes("In `a` replace `1` by `2`.", "In `a` replace `2` by `3`.")
    reply = client.post("/v1/responses", json={"input": instruction, "tools": TOOLS, "parallel_tool_calls": parallel})
    assert [item["type"] for item in reply.json()["output"]] == ["function_call"]


def test_text_that_is_not_found_ends_the_work_in_words(client: TestClient, folder: Folder) -> None:
    instruction = changes("In `shop.py` replace `a * b` by `a + b`.", "Delete the file `run.sh`.")
    made, text = work(client, folder, instruction, TOOLS)
    assert len(made) == 1
    assert text == "I stopped: edit_file answered with an error: 'a * b' occurs 0 times in shop.py"
    assert (folder.path / "run.sh").exists()


def test_a_command_that_fails_ends_the_work_in_words(client: TestClient, folder: Folder) -> None:
    instruction = changes("Run the command `echo no use >&2; exit 3`.", "Delete the file `run.sh`.")
    made, text = work(client, folder, instruction, TOOLS)
    assert len(made) == 1
    assert text == "I stopped: run_command ended with 3: no use"


def test_a_command_out_of_time_ends_the_work_in_words(client: TestClient, folder: Folder) -> None:
    folder.run_command = lambda command: {"return_code": None, "timed_out": True, "stdout": "half", "stderr": ""}  # type: ignore[method-assign]
    _, text = work(client, folder, changes("Run the command `sleep 100`."), TOOLS)
    assert text == "I stopped: run_command ran out of time: half"


def test_a_command_that_was_to_print_nothing_in_json_is_fine(client: TestClient, folder: Folder) -> None:
    folder.run_command = lambda command: "plain text"  # type: ignore[method-assign, assignment, return-value]
    _, text = work(client, folder, changes("Run the command `true`."), TOOLS)
    assert text == "Done. Changes made: 1."


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (["In `a` swap `b` and `c`."], "I don't understand '1. In `a` swap `b` and `c`.'"),
        (["Delete the file `a`.", "And then some."], "I don't understand '2. And then some.'"),
        (["Delete the file `a`.\nCarefully."], "I don't understand 'Carefully.'"),
        (["Create the file `a` with this content:"], "I don't see where the content begins and ends"),
        (["Create the file `a` with this content:\n   ```\n   text"], "I don't see where the content begins and ends"),
        ([], "there is nothing under '## What to change'"),
    ],
)
def test_a_list_not_understood_in_full_is_not_begun(
    client: TestClient, folder: Folder, items: list[str], reason: str
) -> None:
    made, text = work(client, folder, changes(*items), TOOLS)
    assert made == []
    assert text.startswith(f"I can't work out what to do: {reason}")


def test_tools_are_found_by_what_they_are_called_and_take(client: TestClient, folder: Folder) -> None:
    tools = [
        tool("edit_lines", "path", "first", "last", "new"),
        tool("str_replace", "file_path", "old_str", "new_str"),
        tool("create", "filename", "file_text", "owner"),
        tool("bash", "cmd"),
    ]
    tools[2]["parameters"]["properties"]["owner"] = {"type": ["string", "null"]}
    seen: list[Any] = []
    folder.call = lambda name, arguments: seen.append((name, arguments)) or {}  # type: ignore[func-returns-value, method-assign]
    instruction = changes(
        "In `a` replace `b` by `c`.",
        "Create the file `d` with this content:\n   ```\n   e\n   ```",
        "Delete the file `it's`.",
    )
    work(client, folder, instruction, tools)
    assert seen == [
        ("str_replace", {"file_path": "a", "old_str": "b", "new_str": "c"}),
        ("create", {"filename": "d", "file_text": "e\n", "owner": None}),
        ("bash", {"cmd": "rm -- 'it'\"'\"'s'"}),
    ]


def test_tools_served_over_mcp_are_known_by_the_last_part_of_their_names(client: TestClient, folder: Folder) -> None:
    tools = [{**it, "name": f"mcp__run_and_edit__{it['name']}"} for it in TOOLS]
    made, _ = work(client, folder, changes("In `shop.py` replace `a - b` by `a + b`."), tools)
    assert [name for name, _ in made] == ["mcp__run_and_edit__edit_file"]


@pytest.mark.parametrize("kept", ["run_command", "edit_file"])
def test_a_change_no_tool_is_for_is_refused_before_the_first(client: TestClient, folder: Folder, kept: str) -> None:
    instruction = changes("In `shop.py` replace `a - b` by `a + b`.", "Delete the file `run.sh`.")
    made, text = work(client, folder, instruction, [it for it in TOOLS if it["name"] == kept])
    assert made == []
    assert "none of the tools is there to" in text
    assert f"({kept})" in text


def test_it_carries_out_what_the_rows_of_swe_rebench_say(client: TestClient, tmp_path: Path) -> None:
    file = PARENT_DIR / "resources_servers" / "swe_rebench" / "data" / "example.jsonl"
    rows = {row["image_name"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    for repository in example_repositories():
        params = rows.pop(repository.image_name)["responses_create_params"]
        folder = tmp_path / repository.name
        build_repository(repository, folder)
        made, text = work(client, Folder(folder), params["input"][0]["content"], params["tools"])
        assert text == f"Done. Changes made: {len(made)}."
        status = ["git", "status", "--porcelain"]
        assert subprocess.run(status, cwd=folder, capture_output=True, check=True).stdout, repository.name
    assert rows == {}
