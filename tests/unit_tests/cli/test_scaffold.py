from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml

from nemo_gym.cli.scaffold import class_name, create_environment
from nemo_gym.errors import UsageError


def test_a_new_environment_has_every_file_of_a_component(tmp_path: Path) -> None:
    files = create_environment("unit_converter", tmp_path / "resources_servers")
    folder = tmp_path / "resources_servers" / "unit_converter"
    assert {str(path.relative_to(folder)) for path in files} == {
        "app.py",
        "configs/unit_converter.yaml",
        "data/example.jsonl",
        "README.md",
        "requirements.txt",
        "tests/test_app.py",
    }
    assert {path for path in folder.rglob("*") if path.is_file()} == set(files)


def test_no_placeholder_is_left_in_it(tmp_path: Path) -> None:
    for path in create_environment("unit_converter", tmp_path):
        assert "$" not in path.read_text(encoding="utf-8"), path


def test_its_configuration_serves_it_with_two_workers(tmp_path: Path) -> None:
    create_environment("unit_converter", tmp_path)
    config = yaml.safe_load((tmp_path / "unit_converter" / "configs" / "unit_converter.yaml").read_text())
    assert config["unit_converter"]["resources_servers"]["unit_converter"]["num_workers"] == 2
    agent = config["unit_converter_simple_agent"]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"]["name"] == "unit_converter"


def test_its_class_is_named_after_the_folder(tmp_path: Path) -> None:
    create_environment("unit_converter", tmp_path)
    tree = ast.parse((tmp_path / "unit_converter" / "app.py").read_text())
    assert "UnitConverterResourcesServer" in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_its_rows_are_requests_with_tools(tmp_path: Path) -> None:
    create_environment("unit_converter", tmp_path)
    lines = (tmp_path / "unit_converter" / "data" / "example.jsonl").read_text().splitlines()
    assert len(lines) == 5
    for line in lines:
        tools = json.loads(line)["responses_create_params"]["tools"]
        assert [tool["name"] for tool in tools] == ["add_to_tally", "read_tally"]


@pytest.mark.parametrize(
    ("name", "proposal"),
    [
        ("UnitConverter", "unit_converter"),
        ("unit-converter", "unit_converter"),
        ("2048", "env_2048"),
        ("class", "env_class"),
        ("../evil", "evil"),
        ("a/b", "a_b"),
        ("", "env"),
        ("größe", "gr_e"),
    ],
)
def test_a_name_that_is_no_identifier_is_refused_with_one_that_is(tmp_path: Path, name: str, proposal: str) -> None:
    with pytest.raises(UsageError, match=f"For example: {proposal}$"):
        create_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "app.py").write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        create_environment("mine", tmp_path)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["app.py"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "resources_servers").write_text("a file where the folder should be")
    with pytest.raises(UsageError, match="resources_servers"):
        create_environment("mine", tmp_path / "resources_servers")


@pytest.mark.parametrize(
    ("name", "expected"), [("tally", "Tally"), ("unit_converter", "UnitConverter"), ("a_2b", "A2b")]
)
def test_snake_case_becomes_a_class_name(name: str, expected: str) -> None:
    assert class_name(name) == f"{expected}ResourcesServer"
