"""The examples of docs/configuration.md are true."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nemo_gym.errors import ConfigError
from nemo_gym.global_config import NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, load_global_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


def holding(language: str, words: str) -> str:
    (text,) = (text for text in blocks(language) if words in text)
    return text


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder with the page's first example as `my.yaml`, the process's working directory."""
    (tmp_path / "my.yaml").write_text(blocks("yaml")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_example_is_a_whole_configuration(project: Path) -> None:
    config = load_global_config(["my.yaml"])

    assert {name: instance.kind for name, instance in config.instances.items()} == {
        "counter": "resources_servers",
        "counter_agent": "responses_api_agents",
        "policy_model": "responses_api_models",
    }
    assert config.instances["counter"].num_workers == 4


@pytest.mark.parametrize("text", blocks("yaml")[1:])
def test_every_other_example_is_yaml_that_loads(project: Path, text: str) -> None:
    (project / "more.yaml").write_text(text)

    assert load_global_config(["my.yaml", "more.yaml"]).sources == [project / "my.yaml", project / "more.yaml"]


def test_the_overrides_of_the_page_apply(project: Path) -> None:
    _, _, _, flag, path, *overrides = shlex.split(holding("bash", "max_steps").replace("\\\n", ""))
    config = load_global_config([path], overrides)

    assert flag == "--config"
    assert config.instances["counter"].num_workers == 8
    assert config.instances["counter_agent"].settings["max_steps"] == 20
    assert config.config_dict.policy_model_name == "my-model"


def test_the_interpolations_of_the_page_resolve(project: Path) -> None:
    (project / "more.yaml").write_text(holding("yaml", "oc.env"))
    judge: Any = OmegaConf.to_container(load_global_config(["more.yaml"]).config_dict.judge, resolve=True)

    assert judge == {
        "base_url": "http://localhost:8000/v1",
        "api_key": "none",
        "timeout": 30,
        "headers": {"x-base": "http://localhost:8000/v1"},
        "prompt": "Write ${name} for your name.",
    }


@pytest.mark.parametrize("shown", holding("text", "my.yaml").strip().split("\n\n"))
def test_the_errors_of_the_page_read_as_shown(project: Path, shown: str) -> None:
    text = (project / "my.yaml").read_text()
    if "num_workers" in shown:
        text = text.replace("num_workers: 4", "num_workers: '4'")
    elif "countr" in shown:
        text = text.replace("name: counter}", "name: countr}")
    else:
        text = "# 1\n# 2\njudge:\n  api_key: ${judge_api_key}\n"
    (project / "my.yaml").write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_global_config(["my.yaml"])
    told, expected = str(caught.value).replace(str(project), "/home/me"), shown
    assert re.sub(r"yaml:\d+", "yaml:N", told) == re.sub(r"yaml:\d+", "yaml:N", expected)


def test_the_python_of_the_page_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading, receiving = blocks("python")
    scope: dict[str, Any] = {}
    exec(loading, scope)
    monkeypatch.setenv(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, scope["config"].to_json())
    exec(receiving, scope)

    counter, policy = capsys.readouterr().out.splitlines()
    assert counter.startswith("counter http://127.0.0.1:")
    assert policy == f"127.0.0.1 {scope['config'].instances['policy_model'].port}"
    assert scope["config"].instances["policy_model"].num_workers == 2
