from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nemo_gym.cli.run_plan import RunPlan, output_path
from nemo_gym.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def agent(server: str | None = "counter", datasets: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    settings: dict[str, Any] = {"entrypoint": "app.py", "datasets": datasets}
    if server:
        settings["resources_server"] = {"type": "resources_servers", "name": server}
    return {"responses_api_agents": {"simple_agent": settings}}


def dataset(path: str, type_: str = "example") -> dict[str, Any]:
    return {"name": type_, "type": type_, "jsonl_fpath": path}


def test_the_only_agent_is_the_one() -> None:
    plan = RunPlan({"a": agent()}, None)
    assert (plan.agent, plan.environment) == ("a", "counter")


def test_an_agent_without_resources_server_gives_its_own_name_to_the_results() -> None:
    assert RunPlan({"relay": agent(None)}, None).environment == "relay"


def test_of_several_agents_none_is_chosen() -> None:
    plan = RunPlan({"a": agent("x"), "b": agent("y")}, None)
    assert (plan.agent, plan.environment) == (None, "x+y")
    with pytest.raises(UsageError, match=r"which agent\? The configuration has a, b"):
        plan.input_path(None)


def test_of_several_agents_the_named_one_counts() -> None:
    plan = RunPlan({"a": agent("x"), "b": agent("y")}, "b")
    assert (plan.agent, plan.environment) == ("b", "y")


def test_an_unknown_agent_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no agent of this name\nDid you mean 'walker'\?"):
        RunPlan({"walker": agent(), "b": agent()}, "wakler")


def test_a_configuration_without_agent_cannot_run() -> None:
    with pytest.raises(UsageError, match="no agent to run rollouts"):
        RunPlan({"m": {"responses_api_models": {"x": {}}}, "policy_model_name": "m"}, None)


def test_a_dataset_says_how_many_rollouts_its_rows_get() -> None:
    several = {**dataset("examples.jsonl"), "num_repeats": 4}
    assert RunPlan({"a": agent(datasets=[several])}, None).dataset_repeats() == 4
    assert RunPlan({"a": agent(datasets=[dataset("examples.jsonl")])}, None).dataset_repeats() == 1


def test_the_default_input_is_the_agents_example_dataset(here: Path) -> None:
    (here / "examples.jsonl").touch()
    (here / "train.jsonl").touch()
    plan = RunPlan({"a": agent(datasets=[dataset("train.jsonl", "train"), dataset("examples.jsonl")])}, None)
    assert plan.input_path(None) == here / "examples.jsonl"


def test_an_added_agent_runs_the_examples_of_its_environments_other_agent(here: Path) -> None:
    (here / "examples.jsonl").touch()
    plan = RunPlan({"a": agent(datasets=[dataset("examples.jsonl")]), "added": agent()}, "added")
    assert plan.input_path(None) == here / "examples.jsonl"


def test_a_relay_runs_the_examples_of_the_agent_behind_it(here: Path) -> None:
    (here / "examples.jsonl").touch()
    relay = {"responses_api_agents": {"legacy_agent": {"agent_server": {"type": "responses_api_agents", "name": "a"}}}}
    plan = RunPlan({"a": agent(datasets=[dataset("examples.jsonl")]), "relay": relay}, "relay")
    assert plan.environment == "counter"
    assert plan.input_path(None) == here / "examples.jsonl"


def test_relays_in_a_circle_have_no_environment() -> None:
    def relay_to(name: str) -> dict[str, Any]:
        return {"responses_api_agents": {"relay": {"agent_server": {"type": "responses_api_agents", "name": name}}}}

    assert RunPlan({"a": relay_to("b"), "b": relay_to("a")}, "a").environment == "a"


def test_the_examples_of_another_environment_are_not_taken() -> None:
    plan = RunPlan({"a": agent("other", [dataset("examples.jsonl")]), "added": agent()}, "added")
    with pytest.raises(UsageError, match="no dataset of type example"):
        plan.input_path(None)


def test_a_dataset_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match=r"the example dataset gone\.jsonl of the agent a does not exist"):
        RunPlan({"a": agent(datasets=[dataset("gone.jsonl")])}, None).input_path(None)


def test_an_input_that_does_not_exist_is_named() -> None:
    with pytest.raises(UsageError, match=r"--input gone\.jsonl: there is no such file"):
        RunPlan({"a": agent()}, None).input_path(Path("gone.jsonl"))


def test_an_input_that_is_a_folder_is_called_one(here: Path) -> None:
    with pytest.raises(UsageError, match="expected a file, this is a folder"):
        RunPlan({"a": agent()}, None).input_path(here)


def test_an_input_is_looked_for_where_components_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = here / "elsewhere"
    (roots / "data").mkdir(parents=True)
    (roots / "data" / "rows.jsonl").touch()
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(roots))
    plan = RunPlan({"a": agent()}, None)
    assert plan.input_path(Path("data/rows.jsonl")) == roots / "data" / "rows.jsonl"
    (here / "data").mkdir()
    (here / "data" / "rows.jsonl").touch()
    assert plan.input_path(Path("data/rows.jsonl")) == Path("data/rows.jsonl")


def test_an_input_need_not_be_a_regular_file_to_be_told_from_a_missing_one(here: Path) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(UsageError, match="read twice"):
        RunPlan({"a": agent()}, None).input_path(Path("pipe"))


def test_a_path_that_no_file_can_have_is_an_error_of_the_call() -> None:
    name = "x" * 300
    with pytest.raises(UsageError, match="--input"):
        RunPlan({"a": agent()}, None).input_path(Path(name))
    with pytest.raises(UsageError, match="--output"):
        output_path("counter", Path(name), resume=False, overwrite=False)


def test_a_resumed_run_must_ask_the_same_model() -> None:
    config = {"a": agent(), "policy_model": {"responses_api_models": {"vllm_model": {}}}, "policy_model_name": "m1"}
    assert RunPlan(config, None).run_settings() == {"model_type": "vllm_model", "policy_model_name": "m1"}


def test_the_default_output_is_a_new_folder_named_by_time() -> None:
    path = output_path("counter", None, resume=False, overwrite=False)
    assert path.parts[:2] == ("results", "counter")
    assert path.name == "rollouts.jsonl"
    assert not path.exists()
    assert path.parent.name.endswith(f"Z-{os.getpid()}"), "two calls of one second must not meet"


def test_resume_takes_the_newest_run(here: Path) -> None:
    for time in ("20260101T000000Z", "20260301T000000Z", "20260201T000000Z"):
        folder = here / "results" / "counter" / time
        folder.mkdir(parents=True)
        (folder / "rollouts.jsonl").touch()
    (here / "results" / "counter" / "20260401T000000Z").mkdir()
    path = output_path("counter", None, resume=True, overwrite=False)
    assert path == Path("results/counter/20260301T000000Z/rollouts.jsonl")


def test_resume_without_an_earlier_run_says_so() -> None:
    with pytest.raises(UsageError, match=r"nothing to resume in results/counter"):
        output_path("counter", None, resume=True, overwrite=False)


def test_results_are_neither_continued_nor_replaced_unasked(here: Path) -> None:
    given = here / "out.jsonl"
    given.write_text("{}\n")
    with pytest.raises(UsageError, match="holds results already\nContinue them with --resume"):
        output_path("counter", given, resume=False, overwrite=False)
    assert output_path("counter", given, resume=True, overwrite=False) == given
    assert output_path("counter", given, resume=False, overwrite=True) == given


def test_an_output_that_is_a_folder_is_refused(here: Path) -> None:
    with pytest.raises(UsageError, match="this is a folder"):
        output_path("counter", here, resume=False, overwrite=False)
