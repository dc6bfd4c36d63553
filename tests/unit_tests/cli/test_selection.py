from __future__ import annotations

from pathlib import Path

import pytest

from nemo_gym.cli.selection import Components, component_folder, select
from nemo_gym.errors import ConfigError, UsageError
from nemo_gym.paths import PARENT_DIR

MODEL_REF = "{type: responses_api_models, name: policy_model}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two environments, an agent and a model type of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("maze", "quiz"):
        add_component(
            tmp_path,
            "resources_servers",
            name,
            f"""
{name}: {{resources_servers: {{{name}: {{entrypoint: app.py}}}}}}
{name}_agent:
  responses_api_agents:
    walker:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: {name}}}
      model_server: {MODEL_REF}
""",
        )
    add_component(
        tmp_path,
        "responses_api_agents",
        "walker",
        f"""
walker:
  responses_api_agents:
    walker:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: "???"}}
      model_server: {MODEL_REF}
""",
    )
    add_component(
        tmp_path,
        "responses_api_models",
        "parrot",
        "policy_model: {responses_api_models: {parrot: {entrypoint: app.py}}}",
    )
    return tmp_path


def add_component(root: Path, kind: str, name: str, config: str) -> None:
    folder = root / kind / name
    (folder / "configs").mkdir(parents=True)
    (folder / "app.py").touch()
    (folder / "configs" / f"{name}.yaml").write_text(config)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_nothing_chosen_is_an_error_that_lists_what_there_is(here: Path) -> None:
    with pytest.raises(UsageError, match=r"--resources-server NAME.*\n.*maze, quiz"):
        select(Components())


def test_a_resources_server_brings_its_configuration_and_the_default_model(here: Path) -> None:
    selection = select(Components(resources_servers=["maze"], overrides=["a=1"]))
    assert selection.config_paths == [
        here / "resources_servers" / "maze" / "configs" / "maze.yaml",
        PARENT_DIR / "responses_api_models" / "pattern_model" / "configs" / "pattern_model.yaml",
    ]
    assert selection.overrides == ["a=1"]
    assert selection.agent is None


def test_another_configuration_of_a_component_is_named_after_a_slash(here: Path) -> None:
    (here / "resources_servers" / "maze" / "configs" / "hard.yaml").write_text("x: 1")
    assert names(select(Components(resources_servers=["maze/hard"])).config_paths) == ["hard.yaml"]


def test_an_unknown_configuration_of_a_component_suggests_a_known_one(here: Path) -> None:
    (here / "resources_servers" / "maze" / "configs" / "hard.yaml").write_text("x: 1")
    with pytest.raises(UsageError, match=r"'maze' has no configuration 'hardd'\nDid you mean 'hard'\?"):
        select(Components(resources_servers=["maze/hardd"]))


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (Components(resources_servers=["mzae"]), r"no resources server 'mzae'\nDid you mean 'maze'\?"),
        (Components(resources_servers=["zzzzzz"]), r"no resources server 'zzzzzz'\nKnown: .*maze, quiz"),
        (Components(resources_servers=["walker"]), r"'walker' is of another kind: --agent walker"),
        (Components(resources_servers=[""]), r"no resources server ''"),
        (Components(resources_servers=["maze"], model_type="parot"), r"no model type 'parot'\nDid you mean 'parrot'\?"),
        (
            Components(resources_servers=["maze"], agent="maze_agnet"),
            r"--agent maze_agnet: .*\nDid you mean 'maze_agent'",
        ),
        (Components(configs=["nowhere.yaml"]), r"--config nowhere.yaml: there is no such file"),
    ],
)
def test_a_name_that_is_not_known_is_answered_with_the_nearest(
    here: Path, components: Components, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        select(components)


def test_a_model_type_takes_the_place_of_the_default(here: Path) -> None:
    selection = select(Components(resources_servers=["maze"], model_type="parrot"))
    assert names(selection.config_paths) == ["maze.yaml", "parrot.yaml"]


def test_a_policy_model_in_a_file_takes_the_place_of_the_default(here: Path) -> None:
    (here / "mine.yaml").write_text("policy_model: {responses_api_models: {parrot: {entrypoint: app.py}}}")
    selection = select(Components(resources_servers=["maze"], configs=["mine.yaml"]))
    assert names(selection.config_paths) == ["maze.yaml", "mine.yaml"]


def test_no_model_is_added_where_nothing_asks_for_one(here: Path) -> None:
    (here / "mine.yaml").write_text("maze: {resources_servers: {maze: {entrypoint: app.py}}}")
    assert names(select(Components(configs=["mine.yaml"])).config_paths) == ["mine.yaml"]


def test_an_agent_of_the_configuration_is_only_named(here: Path) -> None:
    selection = select(Components(resources_servers=["maze", "quiz"], agent="quiz_agent", model_type="parrot"))
    assert selection.agent == "quiz_agent"
    assert names(selection.config_paths) == ["maze.yaml", "quiz.yaml", "parrot.yaml"]
    assert selection.overrides == []


def test_an_agent_implementation_is_added_for_the_resources_server(here: Path) -> None:
    selection = select(Components(resources_servers=["maze"], agent="walker", model_type="parrot", overrides=["a=1"]))
    assert names(selection.config_paths) == ["maze.yaml", "parrot.yaml", "walker.yaml"]
    assert selection.agent == "walker"
    assert selection.overrides == ["walker.responses_api_agents.walker.resources_server.name=maze", "a=1"]


def test_an_agent_that_relays_is_added_for_the_agent(here: Path) -> None:
    add_component(
        here,
        "responses_api_agents",
        "relay",
        """
relay:
  responses_api_agents:
    relay: {entrypoint: app.py, agent_server: {type: responses_api_agents, name: other_agent}}
""",
    )
    selection = select(Components(resources_servers=["maze"], agent="relay", model_type="parrot"))
    assert selection.overrides == ["relay.responses_api_agents.relay.agent_server.name=maze_agent"]


def test_the_added_agent_comes_out_of_the_configuration_complete(here: Path) -> None:
    config = select(Components(resources_servers=["quiz"], agent="walker", model_type="parrot")).load()
    assert config.instances["walker"].settings["resources_server"] == {"type": "resources_servers", "name": "quiz"}


def test_an_agent_for_one_of_several_resources_servers_must_say_which(here: Path) -> None:
    with pytest.raises(UsageError, match=r"for which resources server\? The configuration has maze, quiz"):
        select(Components(resources_servers=["maze", "quiz"], agent="walker"))


def test_a_broken_file_is_reported_as_such(here: Path) -> None:
    (here / "mine.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"mine\.yaml: not valid YAML"):
        select(Components(configs=["mine.yaml"]))


def test_a_file_named_twice_counts_once(here: Path) -> None:
    assert names(select(Components(resources_servers=["maze", "maze"], model_type="parrot")).config_paths) == [
        "maze.yaml",
        "parrot.yaml",
    ]


def test_a_component_folder_cannot_lead_out_of_its_root(here: Path) -> None:
    (here / "outside").mkdir()
    with pytest.raises(UsageError, match="no resources server"):
        component_folder("resources_servers", "../outside")
