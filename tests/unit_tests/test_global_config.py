"""From files, overrides and env.yaml to one resolved configuration."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from omegaconf import DictConfig, OmegaConf

from nemo_gym.config_types import BaseRunServerInstanceConfig, DatasetConfig, ServerInstance
from nemo_gym.errors import ConfigError
from nemo_gym.global_config import (
    NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME,
    GlobalConfig,
    GlobalConfigDictParser,
    GlobalConfigDictParserConfig,
    find_open_port,
    get_first_server_config_dict,
    get_global_config_dict,
    load_global_config,
    maybe_get_global_config_dict,
)

COUNTER = "counter: {resources_servers: {counter_env: {entrypoint: app.py}}}\n"
AGENT = """
counter_agent:
  responses_api_agents:
    loop_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: counter}
"""
SETTINGS = "counter.resources_servers.counter_env"

Load = Callable[..., GlobalConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that writes its texts to files of a project and loads them with its overrides."""
    for kind, name in (("resources_servers", "counter_env"), ("responses_api_agents", "loop_agent")):
        (tmp_path / kind / name).mkdir(parents=True)
        (tmp_path / kind / name / "app.py").touch()

    def load(*texts: str, overrides: tuple[str, ...] = (), env: str | None = None) -> GlobalConfig:
        if env is not None:
            (tmp_path / "env.yaml").write_text(env)
        names = [f"config{number}.yaml" for number in range(1, len(texts) + 1)]
        for name, text in zip(names, texts, strict=True):
            (tmp_path / name).write_text(text)
        return load_global_config(names, overrides, working_dir=tmp_path)

    return load


def plain(config: GlobalConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config.config_dict, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key != "head_server"}


def test_an_instance_gets_what_its_settings_leave_out(load: Load, tmp_path: Path) -> None:
    config = load(COUNTER)

    port = config.instances["counter"].port
    assert config.instances["counter"] == ServerInstance(
        name="counter",
        kind="resources_servers",
        implementation="counter_env",
        entrypoint="app.py",
        host="127.0.0.1",
        port=port,
        num_workers=1,
        folder=tmp_path / "resources_servers" / "counter_env",
        settings={"entrypoint": "app.py", "host": "127.0.0.1", "port": port, "num_workers": 1},
    )
    assert config.config_dict.head_server.host == "127.0.0.1"
    assert 1 <= config.config_dict.head_server.port <= 65535


def test_configured_values_are_kept_as_written(load: Load) -> None:
    config = load(
        """
        head_server: {host: 0.0.0.0, port: 11000}
        counter:
          resources_servers:
            counter_env: {entrypoint: app.py, host: localhost, port: 11001, num_workers: 3, free: {a: [1, null]}}
        """
    )

    counter = config.instances["counter"]
    assert (counter.host, counter.port, counter.num_workers) == ("localhost", 11001, 3)
    assert counter.settings["free"] == {"a": [1, None]}
    assert config.config_dict.head_server == {"host": "0.0.0.0", "port": 11000}


def test_null_means_left_out(load: Load) -> None:
    keys = ("entrypoint", "host", "port", "num_workers", "domain", "description", "verified", "datasets")
    nulls = tuple(f"{SETTINGS}.{key}=null" for key in keys)

    counter = load(f"head_server:\n{COUNTER}", overrides=nulls).instances["counter"]

    config = BaseRunServerInstanceConfig.model_validate({**counter.settings, "name": "counter"})
    assert config == BaseRunServerInstanceConfig(
        name="counter", entrypoint="app.py", host="127.0.0.1", port=counter.port, num_workers=1
    )


def test_datasets_fit_their_typed_form(load: Load) -> None:
    dataset = "{name: a, type: train, jsonl_fpath: a.jsonl, num_repeats: null, license: MIT}"
    settings = load(COUNTER, overrides=(f"{SETTINGS}.datasets=[{dataset}]",)).instances["counter"].settings

    assert DatasetConfig.model_validate(settings["datasets"][0]).num_repeats == 1


def test_mappings_merge_and_everything_else_is_replaced_in_the_order_of_files(load: Load) -> None:
    config = load(
        COUNTER + "limits: {a: 1, b: [1, 2], c: {d: 1}}\nname: first\n",
        "limits: {b: [3], c: {e: 2}}\nname: second\n",
        f"name: third\n{AGENT}",
    )

    assert config.config_dict.limits == {"a": 1, "b": [3], "c": {"d": 1, "e": 2}}
    assert config.config_dict.name == "third"
    assert list(config.instances) == ["counter", "counter_agent"]


def test_a_later_null_takes_an_instance_away(load: Load) -> None:
    assert list(load(COUNTER + AGENT, "counter_agent: null").instances) == ["counter"]


def test_env_yaml_wins_over_files_and_overrides_win_over_env_yaml(load: Load, tmp_path: Path) -> None:
    config = load(
        "a: file\nb: file\nc: file\n", env="b: env\nc: env\npolicy_api_key: sk-1\n", overrides=("c=command line",)
    )

    assert plain(config) == {"a": "file", "b": "env", "c": "command line", "policy_api_key": "sk-1"}
    assert config.sources == [tmp_path / "config1.yaml", tmp_path / "env.yaml"]


def test_an_env_yaml_of_comments_is_no_error(load: Load) -> None:
    assert plain(load("a: 1", env="# policy_api_key: ...\n")) == {"a": 1}


def test_interpolation_reaches_across_files_env_yaml_and_the_environment(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_LEVEL", "7")
    config = load(
        """
        url: http://${host_name}:${port_number}/v1
        copy: ${defaults}
        relative: {a: 1, b: "${.a}"}
        level: ${oc.decode:${oc.env:MY_LEVEL}}
        literal: \\${not_a_key}
        """,
        "defaults: {x: [1, '${port_number}']}",
        env="host_name: example.com",
        overrides=("port_number=80",),
    )

    assert plain(config) == {
        "url": "http://example.com:80/v1",
        "copy": {"x": [1, 80]},
        "relative": {"a": 1, "b": 1},
        "level": 7,
        "literal": "${not_a_key}",
        "defaults": {"x": [1, 80]},
        "host_name": "example.com",
        "port_number": 80,
    }


def test_settings_may_be_interpolated_whole(load: Load) -> None:
    config = load(
        COUNTER.replace("{entrypoint: app.py}", "'${common}'") + "common: {entrypoint: app.py, num_workers: 2}"
    )

    assert config.instances["counter"].num_workers == 2
    assert config.config_dict.common == {"entrypoint": "app.py", "num_workers": 2}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("4", 4),
        ("'4'", "4"),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("", None),
        ("[a, 1]", ["a", 1]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("http://host:80/v1?a=b", "http://host:80/v1?a=b"),
        ("2026-01-31", "2026-01-31"),
        ("two words", "two words"),
    ],
)
def test_the_value_of_an_override_is_yaml(load: Load, value: str, expected: object) -> None:
    assert plain(load("a: 1", overrides=(f"new.sub={value}",))) == {"a": 1, "new": {"sub": expected}}


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_overrides_change_instances_add_keys_and_reach_into_lists(load: Load, plus: str) -> None:
    config = load(
        COUNTER + "items: [{a: 1}, {a: 2}]",
        overrides=(f"{plus}{SETTINGS}.num_workers=4", f"{plus}{SETTINGS}.max_count=9", f"{plus}items.1.a=3"),
    )

    assert config.instances["counter"].num_workers == 4
    assert config.instances["counter"].settings["max_count"] == 9
    assert config.config_dict["items"] == [{"a": 1}, {"a": 3}]


def test_overrides_apply_in_order_and_a_mapping_merges(load: Load) -> None:
    config = load("a: {x: 1, y: 1}", overrides=("a={y: 2, z: 2}", "a.z=3"))

    assert plain(config) == {"a": {"x": 1, "y": 2, "z": 3}}


def test_an_override_may_define_a_whole_instance(load: Load) -> None:
    config = load("a: 1", overrides=("other.resources_servers.counter_env.entrypoint=app.py",))

    assert config.instances["other"].implementation == "counter_env"


def test_expected_keys_are_never_taken_for_a_slip(load: Load) -> None:
    config = load(
        "policy_models: {}\nmy_setting: ${my_settings}\n",
        overrides=("policy_model_name=m", "my_settings=1", "policy_api_key=k"),
    )

    assert (config.config_dict.policy_model_name, config.config_dict.my_setting) == ("m", 1)


def test_yaml_anchors_and_merge_keys_work_also_twice(load: Load) -> None:
    config = load("base: &base {a: 1, b: 1}\nx: &x {<<: *base, b: 2}\ny: *x\nz: [*x, *x]\n")

    merged = {"a": 1, "b": 2}
    assert plain(config) == {"base": {"a": 1, "b": 1}, "x": merged, "y": merged, "z": [merged, merged]}


def test_free_ports_are_distinct_and_avoid_those_already_given(load: Load) -> None:
    many = "".join(
        f"counter{number}: {{resources_servers: {{counter_env: {{entrypoint: app.py}}}}}}\n" for number in range(40)
    )
    config = load(many)

    ports = [instance.port for instance in config.instances.values()] + [config.config_dict.head_server.port]
    assert len(set(ports)) == 41


def test_one_port_on_different_addresses_is_no_conflict(load: Load) -> None:
    text = "one: {{resources_servers: {{counter_env: {{host: {}, port: 9000}}}}}}\n"
    config = load(text.format("127.0.0.1") + text.replace("one", "two").format("127.0.0.2"))

    assert [instance.port for instance in config.instances.values()] == [9000, 9000]


def test_find_open_port_gives_a_port_that_can_be_bound_and_is_not_excluded() -> None:
    port = find_open_port()
    with socket.create_server(("127.0.0.1", port)):
        assert find_open_port(exclude={port}) != port


def test_find_open_port_gives_up_when_everything_is_excluded() -> None:
    with pytest.raises(ConfigError, match="no port is free on host"):
        find_open_port(exclude=range(65536))


def test_a_mapping_with_another_type_is_no_reference(load: Load) -> None:
    tools = [{"type": "function", "name": "get_weather"}, {"type": ["resources_servers"]}, {"type": 3, "name": "x"}]
    config = load(COUNTER, overrides=(f"{SETTINGS}.tools={json.dumps(tools)}",))

    assert config.instances["counter"].settings["tools"] == tools


def test_mappings_that_are_no_instances_are_plain_values(load: Load) -> None:
    text = "limits: {a: {b: 1}}\nempty: {}\nresources: {cpu: 1}\nflag: true\nitems: [1]\n"

    assert dict(load(text).instances) == {}


def test_select_gives_the_instances_of_one_kind(load: Load) -> None:
    config = load(AGENT + COUNTER)

    assert [instance.name for instance in config.select("resources_servers")] == ["counter"]
    assert [instance.name for instance in config.select("responses_api_agents")] == ["counter_agent"]
    assert config.select("responses_api_models") == []


def test_the_working_directory_is_the_process_s_own_by_default(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(COUNTER)
    monkeypatch.chdir(tmp_path)

    assert load_global_config(["config1.yaml"]).instances["counter"].folder.parent.parent == tmp_path
    assert load_global_config([tmp_path / "config1.yaml"]).sources == [tmp_path / "config1.yaml"]


def test_a_file_of_an_extra_root_is_found(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(COUNTER)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(tmp_path))

    assert "counter" in load_global_config(["config1.yaml"], working_dir=elsewhere).instances


def test_no_files_give_a_configuration_without_servers(tmp_path: Path) -> None:
    config = load_global_config([], working_dir=tmp_path)

    assert dict(config.instances) == {}
    assert list(config.config_dict) == ["head_server"]


def test_secrets_are_masked_wherever_they_went(load: Load) -> None:
    config = load(
        """
        policy_api_key: sk-123456789
        session_secret: [new-secret-123456, old-secret-123456]
        judge: {hf_token: "hf", nested_secret: {a: x, b: [y, null]}, max_tokens: 5, password: 1234}
        headers: ["Bearer ${policy_api_key}"]
        note: hf is fine
        """
    )

    masked = config.to_yaml(mask_secrets=True)

    assert "sk-123456789" not in masked
    values: Any = OmegaConf.create(masked)
    assert values.policy_api_key == "***"
    assert values.session_secret == ["***", "***"]
    assert values["headers"] == ["Bearer ***"]
    assert values.judge == {
        "hf_token": "***",
        "nested_secret": {"a": "***", "b": ["***", None]},
        "max_tokens": 5,
        "password": "***",
    }
    assert values.note == "hf is fine"
    assert "sk-123456789" in config.to_yaml()


TEXT = st.text(st.characters(codec="utf-8"))
KEYS = st.text(st.characters(codec="utf-8"), max_size=100)  # YAML ends a key after 1024 bytes of its escaped form
JSON_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["-.5", "1e3", "12:30", "2026-01-31", "=", "~", "no", "0x1f", "\\", "${", "\\${a}", "\\\\${b}"])
).filter(lambda value: value != "???")
JSON_VALUES = st.recursive(
    JSON_SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def escaped(value: Any) -> Any:
    """Write each `${` as text, the way the documentation tells."""
    if isinstance(value, dict):
        return {key: escaped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escaped(child) for child in value]
    if not isinstance(value, str):
        return value
    head, *rest = value.split("${")
    for part in rest:
        slashes = len(head) - len(head.rstrip("\\"))
        head += "\\" * (slashes + 1) + "${" + part
    return head


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(value=JSON_VALUES)
@example(value="a\\\\${b")
@example(value={"": "\x7f\x00\u2028\ud7ff\U0001f600", "a.b": "-.5"})
def test_any_value_survives_the_way_to_a_server_and_back(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    config = load(json.dumps({"values": [escaped(value)]}))
    assert plain(config) == {"values": [value]}

    for text in (config.to_json(), config.to_yaml(), OmegaConf.to_yaml(config.config_dict)):
        if "\0" in text:
            continue
        with monkeypatch.context() as patch:
            patch.setenv(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, text)
            received = get_global_config_dict()
        assert OmegaConf.to_container(received, resolve=True) == OmegaConf.to_container(
            config.config_dict, resolve=True
        )

    (tmp_path / "dump.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert load_global_config(["dump.yaml"], working_dir=tmp_path).config_dict == config.config_dict


def test_the_dump_of_a_configuration_loads_to_the_same(load: Load, tmp_path: Path) -> None:
    config = load(COUNTER + AGENT + "note: \\${x} costs 1e3\nempty: {}\n")
    (tmp_path / "dump.yaml").write_text(config.to_yaml())

    again = load_global_config(["dump.yaml"], working_dir=tmp_path)

    assert again.config_dict == config.config_dict
    assert again.instances == config.instances


def test_outside_of_a_server_there_is_no_configuration() -> None:
    assert maybe_get_global_config_dict() is None
    with pytest.raises(ConfigError) as caught:
        get_global_config_dict()

    assert NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME in str(caught.value)
    assert "gym env start" in str(caught.value)


def test_a_server_s_configuration_is_parsed_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, load(COUNTER).to_json())
    first = get_global_config_dict()

    assert get_global_config_dict() is first
    monkeypatch.setenv(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, '{"other": 1}')
    assert get_global_config_dict() == {"other": 1}


@pytest.mark.parametrize("text", ["[1]", "just text", "a: [", "# nothing"])
def test_unusable_text_in_the_variable_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME, text)

    with pytest.raises(ConfigError, match=NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME):
        get_global_config_dict()


def test_the_settings_of_an_instance_are_found_by_name(load: Load) -> None:
    config = load(COUNTER + AGENT + "plain: {a: 1}\n")

    assert get_first_server_config_dict(config.config_dict, "counter").entrypoint == "app.py"
    with pytest.raises(ConfigError, match="Did you mean 'counter_agent'"):
        get_first_server_config_dict(config.config_dict, "counter_agnt")
    with pytest.raises(ConfigError, match="There are: counter, counter_agent"):
        get_first_server_config_dict(config.config_dict, "plain")


def test_the_compatibility_door_resolves_a_mapping(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load("a: 1", env="policy_api_key: from_env\n")
    monkeypatch.chdir(tmp_path)
    initial = OmegaConf.create({"counter": {"resources_servers": {"counter_env": {"key": "${policy_api_key}"}}}})
    parser = GlobalConfigDictParser()

    parsed = parser.parse(GlobalConfigDictParserConfig(initial_global_config_dict=initial))
    assert isinstance(parsed, DictConfig)
    assert get_first_server_config_dict(parsed, "counter").key == "from_env"
    assert get_first_server_config_dict(parsed, "counter").num_workers == 1

    (tmp_path / "other.yaml").write_text("policy_api_key: other\n")
    parsed = parser.parse(
        GlobalConfigDictParserConfig(initial_global_config_dict=initial, dotenv_path=tmp_path / "other.yaml")
    )
    assert get_first_server_config_dict(parsed, "counter").key == "other"

    with pytest.raises(ConfigError, match="policy_api_key"):
        parser.parse_no_environment(initial)
    no_model = GlobalConfigDictParserConfig.NO_MODEL_GLOBAL_CONFIG_DICT
    parsed = parser.parse_no_environment(OmegaConf.merge(no_model, initial))  # type: ignore[arg-type]
    assert get_first_server_config_dict(parsed, "counter").key == ""
