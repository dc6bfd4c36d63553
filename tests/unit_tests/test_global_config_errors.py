"""What a user reads when a configuration can't be used: file, key, what was expected, the nearest valid name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_gym.errors import ConfigError
from nemo_gym.global_config import find_open_port, load_global_config

COUNTER = """counter:
  resources_servers:
    counter_env:
      entrypoint: app.py
"""
AGENT = """agent:
  responses_api_agents:
    loop_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: counter}
"""
BOTH = COUNTER + AGENT
SETTINGS = "counter.resources_servers.counter_env"
AGENT_SETTINGS = "agent.responses_api_agents.loop_agent"
KINDS = "expected exactly one of resources_servers, responses_api_agents, responses_api_models"
SESSION_SECRET_EXPECTED = (
    "session_secret: expected a text of at least 16 characters, or a list of such, newest first\n"
    "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
)

Failure = Callable[..., str]


@pytest.fixture
def failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Failure:
    """Return a function that loads its texts as files of a project and returns the error's text.

    The project's folder reads `~` in the text, and only its own components are found.
    """
    for kind, name in (("resources_servers", "counter_env"), ("responses_api_agents", "loop_agent")):
        (tmp_path / kind / name).mkdir(parents=True)
        (tmp_path / kind / name / "app.py").touch()
    monkeypatch.setattr("nemo_gym.paths.PARENT_DIR", tmp_path)

    def failure(
        *texts: str | bytes, overrides: tuple[str, ...] = (), env: str | None = None, paths: tuple[str, ...] = ()
    ) -> str:
        if env is not None:
            (tmp_path / "env.yaml").write_text(env)
        names = [f"config{number}.yaml" for number in range(1, len(texts) + 1)]
        for name, text in zip(names, texts, strict=True):
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError) as caught:
            load_global_config(
                [*names, *(path.replace("~", str(tmp_path)) for path in paths)], overrides, working_dir=tmp_path
            )
        assert caught.value.exit_code == 2
        return str(caught.value).replace(str(tmp_path), "~")

    return failure


def counter(setting: str) -> str:
    """Return the configuration of a counter with one more setting, in line 5."""
    return f"{COUNTER}      {setting}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            COUNTER.replace("resources_servers", "resource_servers"),
            f"~/config1.yaml:2, counter.resource_servers: unknown server type 'resource_servers'; {KINDS}\n"
            "Did you mean 'resources_servers'?",
            id="unknown type, near to one",
        ),
        pytest.param(
            COUNTER.replace("resources_servers", "things"),
            f"~/config1.yaml:2, counter.things: unknown server type 'things'; {KINDS}",
            id="unknown type, near to none",
        ),
        pytest.param(
            "counter:\n  counter_env:\n    entrypoint: app.py\n",
            f"~/config1.yaml:2, counter.counter_env: unknown server type 'counter_env'; {KINDS}\n"
            "Write: counter: {resources_servers: {counter_env: ...}}",
            id="type left out",
        ),
        pytest.param(
            "resources_servers:\n  counter_env: {entrypoint: app.py}\n",
            "~/config1.yaml:1, resources_servers: the instance's name is missing above the server type\n"
            "Write: my_counter_env: {resources_servers: ...}",
            id="name left out",
        ),
        pytest.param(
            f"{COUNTER}  num_workers: 4\n",
            "~/config1.yaml:5, counter.num_workers: unexpected key beside 'resources_servers'\n"
            "Settings of the server stand below counter.resources_servers.<implementation>.",
            id="setting beside the type",
        ),
        pytest.param(
            COUNTER.replace("counter:", "my/counter:"),
            "~/config1.yaml:2, my/counter.resources_servers: 'my/counter' can't be an instance's name; "
            "expected letters, digits, '_', '-' and '.'",
            id="name that can't be a file's",
        ),
        pytest.param(
            "counter:\n  resources_servers:\n",
            "~/config1.yaml:2, counter.resources_servers: expected a mapping of one implementation's name to its "
            "settings, got nothing (null)\nWrite: <implementation>: {entrypoint: app.py}",
            id="implementation left out",
        ),
        pytest.param(
            "counter:\n  resources_servers: counter_env\n",
            "~/config1.yaml:2, counter.resources_servers: expected a mapping of one implementation's name to its "
            "settings, got the text 'counter_env'\nWrite: counter_env: {entrypoint: app.py}",
            id="implementation as text",
        ),
        pytest.param(
            "counter:\n  resources_servers:\n    counter_env:\n",
            f"~/config1.yaml:3, {SETTINGS}: expected a mapping of settings, got nothing (null)\n"
            "Write: counter_env: {entrypoint: app.py}",
            id="settings left out",
        ),
        pytest.param(
            COUNTER.replace("counter_env", "countr_env"),
            "~/config1.yaml:3, counter.resources_servers.countr_env: there is no folder 'countr_env' in "
            "~/resources_servers\nDid you mean 'counter_env'?",
            id="implementation folder missing, near to one",
        ),
        pytest.param(
            COUNTER.replace("counter_env", "zzz"),
            "~/config1.yaml:3, counter.resources_servers.zzz: there is no folder 'zzz' in ~/resources_servers\n"
            "There are: counter_env",
            id="implementation folder missing, near to none",
        ),
        pytest.param(
            COUNTER.replace("app.py", "ap.py"),
            f"~/config1.yaml:4, {SETTINGS}.entrypoint: there is no file 'ap.py' in ~/resources_servers/counter_env\n"
            "Did you mean 'app.py'?",
            id="entrypoint file missing",
        ),
        pytest.param(
            COUNTER.replace("app.py", "server.txt"),
            f"~/config1.yaml:4, {SETTINGS}.entrypoint: there is no file 'server.txt' in "
            "~/resources_servers/counter_env\nThere is app.py.",
            id="entrypoint file missing, near to none",
        ),
    ],
)
def test_an_instance_of_the_wrong_shape(failure: Failure, text: str, expected: str) -> None:
    assert failure(text) == expected


def test_two_files_that_disagree_about_an_instance_are_both_named(failure: Failure) -> None:
    assert failure(COUNTER, COUNTER.replace("resources_servers", "responses_api_agents")) == (
        f"~/config1.yaml:1, counter: {KINDS}, got 'resources_servers' (~/config1.yaml:2) and "
        "'responses_api_agents' (~/config2.yaml:2)\nGive each its own instance name."
    )
    assert failure(COUNTER, COUNTER.replace("counter_env", "other_env")) == (
        "~/config1.yaml:2, counter.resources_servers: expected a mapping of one implementation's name to its settings, "
        "got 'counter_env' (~/config1.yaml:3) and 'other_env' (~/config2.yaml:3)\nGive each its own instance name."
    )


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        pytest.param(
            "{type: resources_servers, name: countr}",
            ".name: there is no server instance 'countr' of type resources_servers\nDid you mean 'counter'?",
            id="dangling, near to one",
        ),
        pytest.param(
            "{type: resources_servers, name: zzz}",
            ".name: there is no server instance 'zzz' of type resources_servers\nThere are: counter",
            id="dangling, near to none",
        ),
        pytest.param(
            "{type: responses_api_models, name: policy_model}",
            ".name: there is no server instance 'policy_model' of type responses_api_models\n"
            "The configuration has no responses_api_models.",
            id="dangling, none of the type",
        ),
        pytest.param(
            "{type: responses_api_agents, name: counter}",
            ".type: 'counter' is of type resources_servers, not responses_api_agents\n"
            "Write type: resources_servers, or name an instance of responses_api_agents.",
            id="mistyped",
        ),
        pytest.param(
            "{type: resource_servers, name: counter}",
            f".type: unknown server type 'resource_servers'; {KINDS}\nDid you mean 'resources_servers'?",
            id="type misspelt",
        ),
        pytest.param(
            "{type: resources_servers}",
            ".name: a reference of type resources_servers needs the name of an instance, got nothing (null)",
            id="name left out",
        ),
    ],
)
@pytest.mark.parametrize("where", ["{}", "[{}]", "[[1], {{deep: {}}}]"])
def test_a_reference_that_leads_nowhere(failure: Failure, reference: str, where: str, expected: str) -> None:
    key = {"{}": "", "[{}]": ".0"}.get(where, ".1.deep")
    text = BOTH.replace("{type: resources_servers, name: counter}", where.format(reference))

    assert failure(text) == f"~/config1.yaml:9, {AGENT_SETTINGS}.resources_server{key}{expected}"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("num_workers: '4'", "an integer of at least 1, got the text '4'\nWrite it without quotes."),
        ("num_workers: four", "an integer of at least 1, got the text 'four'"),
        ("num_workers: true", "an integer of at least 1, got the truth value true"),
        ("num_workers: 0", "an integer of at least 1, got the number 0"),
        ("num_workers: -1", "an integer of at least 1, got the number -1"),
        ("num_workers: 4.0", "an integer of at least 1, got the number 4.0"),
        ("num_workers: [4]", "an integer of at least 1, got a list"),
        ("port: '8000'", "an integer from 1 to 65535, got the text '8000'\nWrite it without quotes."),
        ("port: true", "an integer from 1 to 65535, got the truth value true"),
        ("port: 0", "an integer from 1 to 65535, got the number 0"),
        ("port: 65536", "an integer from 1 to 65535, got the number 65536"),
        ("host: 3", "a host name or address, got the number 3"),
        ("host: ''", "a host name or address, got the text ''"),
        ("verified: 'yes'", "true or false, got the text 'yes'"),
        ("expose_tools_over_mcp: maybe", "true or false, got the text 'maybe'"),
        ("shutdown_grace_s: -1", "an integer of at least 0, got the number -1"),
        ("worker_health_timeout_s: 0", "an integer of at least 1, got the number 0"),
        ("session_placement: 4", "one of least_loaded, local, got the number 4"),
        ("session_hop: 4", "one of frames, aiohttp, got the number 4"),
        ("description: {a: 1}", "text, got a mapping of a"),
        ("datasets: {}", "a list of datasets, got an empty mapping"),
    ],
)
def test_a_setting_of_the_wrong_type(failure: Failure, setting: str, expected: str) -> None:
    key = setting.partition(":")[0]

    assert failure(counter(setting)) == f"~/config1.yaml:5, {SETTINGS}.{key}: expected {expected}"


def test_an_entrypoint_that_is_no_text(failure: Failure) -> None:
    assert failure(COUNTER.replace("app.py", "3")) == (
        f"~/config1.yaml:4, {SETTINGS}.entrypoint: expected the name of a Python file, got the number 3"
    )


def test_an_instance_named_like_the_head_server(failure: Failure) -> None:
    assert failure(COUNTER.replace("counter:", "head_server:")) == (
        "~/config1.yaml:2, head_server.resources_servers: "
        "'head_server' has a meaning of its own and can't be an instance's name"
    )


def test_an_unknown_domain(failure: Failure) -> None:
    assert failure(counter("domain: maths")) == (
        f"~/config1.yaml:5, {SETTINGS}.domain: expected one of math, coding, agent, knowledge, instruction_following, "
        "long_context, safety, games, translation, e2e, rlhf, other, got the text 'maths'\nDid you mean 'math'?"
    )


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("example", ": expected a mapping with name, type and jsonl_fpath, got the text 'example'"),
        ("{name: a, type: train}", ".jsonl_fpath: expected text, got nothing (null)"),
        ("{type: train, jsonl_fpath: a.jsonl}", ".name: expected text, got nothing (null)"),
        (
            "{name: a, type: trian, jsonl_fpath: a.jsonl}",
            ".type: expected one of example, train, validation, got the text 'trian'\nDid you mean 'train'?",
        ),
        (
            "{name: a, type: train, jsonl_fpath: a.jsonl, num_repeats: 0}",
            ".num_repeats: expected an integer of at least 1, got the number 0",
        ),
    ],
)
def test_a_dataset_that_can_not_be_used(failure: Failure, dataset: str, expected: str) -> None:
    assert failure(counter(f"datasets: [{dataset}]")) == f"~/config1.yaml:5, {SETTINGS}.datasets.0{expected}"


def test_a_wrong_value_that_came_by_interpolation_tells_so(failure: Failure) -> None:
    assert failure(counter("num_workers: ${workers}") + "workers: '4'\n") == (
        f"~/config1.yaml:5, {SETTINGS}.num_workers: expected an integer of at least 1, got the text '4' "
        "(from ${workers})\nWrite it without quotes."
    )


@pytest.mark.parametrize("key", ["num_worker", "num_wrokers", "entry_point"])
def test_a_setting_that_is_a_slip_for_one_the_framework_reads(failure: Failure, key: str) -> None:
    meant = "entrypoint" if key.startswith("entry") else "num_workers"

    assert failure(counter(f"{key}: 3")) == (
        f"~/config1.yaml:5, {SETTINGS}.{key}: unknown setting\nDid you mean '{meant}'?"
    )


@pytest.mark.parametrize(
    ("host", "other_host"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("0.0.0.0", "127.0.0.2"), ("127.0.0.2", "::")],
)
def test_one_port_for_two_servers(failure: Failure, host: str, other_host: str) -> None:
    text = f"{counter('port: 8000')}      host: '{host}'\n{AGENT}      port: 8000\n      host: '{other_host}'\n"

    assert failure(text) == (
        f"~/config1.yaml:12, {AGENT_SETTINGS}.port: port 8000 on {other_host} is also that of {SETTINGS}.port "
        "(~/config1.yaml:5)\nGive each server its own port, or leave it out to have one chosen."
    )


def test_the_head_server_s_port_for_another_server(failure: Failure) -> None:
    assert failure("head_server: {port: 8000}", counter("port: 8000")) == (
        f"~/config2.yaml:5, {SETTINGS}.port: port 8000 on 127.0.0.1 is also that of head_server.port "
        "(~/config1.yaml:1)\nGive each server its own port, or leave it out to have one chosen."
    )


def test_a_port_that_is_disallowed(failure: Failure) -> None:
    assert failure(counter("port: 8000") + "disallowed_ports: [7000, 8000]\n") == (
        f"~/config1.yaml:5, {SETTINGS}.port: port 8000 is one of disallowed_ports\nLeave it out to have one chosen."
    )


def test_a_host_that_is_not_this_machine(failure: Failure) -> None:
    # 192.0.2.0/24 is set apart for documentation (RFC 5737): no machine has it.
    assert failure(counter("host: 192.0.2.1")).startswith(
        f"~/config1.yaml:5, {SETTINGS}.host: no port can be opened on host '192.0.2.1': "
    )
    with pytest.raises(ConfigError, match=r"no port can be opened on host '192\.0\.2\.1'"):
        find_open_port("192.0.2.1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("head_server: 8000", "head_server: expected a mapping of host and port, got the number 8000"),
        (
            "head_server: {port: '8000'}",
            "head_server.port: expected an integer from 1 to 65535, got the text '8000'\nWrite it without quotes.",
        ),
        ("head_server: {host: 1}", "head_server.host: expected a host name or address, got the number 1"),
        ("dry_run: 'no'", "dry_run: expected true or false, got the text 'no'"),
        ("disallowed_ports: 80", "disallowed_ports: expected a list of ports, got the number 80"),
        (
            "disallowed_ports: [80, x]",
            "disallowed_ports.1: expected an integer from 1 to 65535, got the text 'x'",
        ),
        ("policy_model_name: 4", "policy_model_name: expected text\nPut the value in quotes."),
        ("session_secret: 123456", SESSION_SECRET_EXPECTED),
        ("session_secret: too short", SESSION_SECRET_EXPECTED),
        ("session_secret: [long enough for a secret, 1]", SESSION_SECRET_EXPECTED),
        ("session_secret: []", SESSION_SECRET_EXPECTED),
        ("policy_api_key: 123456", "policy_api_key: expected text\nPut the value in quotes."),
    ],
)
def test_a_reserved_key_with_a_value_of_the_wrong_type(failure: Failure, text: str, expected: str) -> None:
    assert failure(text) == f"~/config1.yaml:1, {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            f"{COUNTER}  a: [1, 2\nb: 3\n",
            " at line 6, column 2: while parsing a flow sequence, expected ',' or ']', but got ':'",
            id="unclosed bracket",
        ),
        pytest.param("a: b: c\n", " at line 1, column 5: mapping values are not allowed here", id="two colons"),
        pytest.param(
            "a:\n\tb: 1\n",
            " at line 2, column 1: while scanning for the next token, "
            r"found character '\t' that cannot start any token",
            id="tab",
        ),
        pytest.param(
            "a: 1\nb: \x01\n", r" at line 2, column 4: the character '\x01' is not allowed", id="control code"
        ),
        pytest.param("a: *b\n", " at line 1, column 4: found undefined alias 'b'", id="unknown alias"),
        pytest.param(
            "a: 1\n---\nb: 2\n",
            " at line 2, column 1: expected a single document in the stream, but found another document",
            id="two documents",
        ),
        pytest.param(
            "a: {b: ${c}}",
            " at line 1, column 9: while parsing a flow mapping, expected ',' or '}', but got '{'\n"
            "Within { } and [ ], put ${...} in quotes.",
            id="unquoted interpolation in braces",
        ),
        pytest.param(
            "a: !!python/object:os.system x",
            " at line 1, column 4: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object:os.system'",
            id="Python object",
        ),
    ],
)
def test_a_file_that_is_not_yaml(failure: Failure, text: str, expected: str) -> None:
    assert failure(text) == f"~/config1.yaml: not valid YAML{expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &a [*a]", ":1, a.0: the value contains itself, through a YAML alias"),
        ("a: .nan", ":1, a: expected a finite number, got .nan"),
        ("a: [1, -.inf]", ":1, a.1: expected a finite number, got -.inf"),
        ("a: !!binary aGVsbG8=", ":1, a: values of the YAML tag 'tag:yaml.org,2002:binary' can't be used"),
        ("a: !!float x", ":1, a: not a valid value: could not convert string to float: 'x'"),
        (r'a: "\ud800"', r":1, a: half of a UTF-16 surrogate pair is no character: '\ud800'"),
        ("a: {1: x}", ':1, a: a key must be text, got the number 1\nPut it in quotes: "1"'),
        ("a:\n  on: x", ':2, a: a key must be text, got the truth value true\nPut it in quotes: "on"'),
        ("a: {[1, 2]: x}", ":1, a: a key must be text, got a sequence"),
        (
            f"{COUNTER}counter: 1",
            ":5, counter: the key stands twice in the same mapping, first in line 1\nKeep one of them.",
        ),
        (
            counter("entrypoint: x.py"),
            f":5, {SETTINGS}.entrypoint: the key stands twice in the same mapping, first in line 4\nKeep one of them.",
        ),
        ("a: " + "[" * 41 + "]" * 41, ":1, a: nested too deeply, more than 40 levels"),
        ("a: " + "[" * 4000 + "]" * 4000, ": nested too deeply, more than 40 levels"),
    ],
)
def test_yaml_that_can_not_be_a_configuration(failure: Failure, text: str, expected: str) -> None:
    assert failure(text) == f"~/config1.yaml{expected}"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "null\n", "---\n"])
def test_an_empty_file(failure: Failure, text: str) -> None:
    assert failure(text) == "~/config1.yaml: the file is empty; expected a mapping of server instances and values"


@pytest.mark.parametrize(("text", "got"), [("- a\n", "a list"), ("abc\n", "the text 'abc'"), ("3", "the number 3")])
def test_a_file_that_holds_no_mapping(failure: Failure, text: str, got: str) -> None:
    problem = f"expected a mapping (`key: value`) at the top of the file, got {got}"

    assert failure("a: 1", text) == f"~/config2.yaml: {problem}"
    assert failure("a: 1", env=text) == f"~/env.yaml: {problem}"


def test_a_file_that_is_no_text(failure: Failure) -> None:
    assert failure(b"a: \xff\n") == "~/config1.yaml: the file is not UTF-8 text: byte 3 is not valid"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("confg1.yaml", "confg1.yaml: there is no such file in ~\nDid you mean 'config1.yaml'? (in ~)"),
        ("~/confg1.yaml", "~/confg1.yaml: there is no such file\nDid you mean 'config1.yaml'? (in ~)"),
        (
            "resource_servers/counter_env/x.yaml",
            "resource_servers/counter_env/x.yaml: there is no such file in ~\nDid you mean 'resources_servers'? (in ~)",
        ),
        ("zzz.yaml", "zzz.yaml: there is no such file in ~"),
        ("resources_servers", "~/resources_servers: expected a YAML file, this is a folder"),
    ],
)
def test_a_file_that_is_not_there(failure: Failure, path: str, expected: str) -> None:
    assert failure("a: 1", paths=(path,)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            counter("api_key: ${policy_api_key}"),
            f":5, {SETTINGS}.api_key: ${{policy_api_key}} needs 'policy_api_key', which is not set\n"
            "Set it in ~/env.yaml, or on the command line: policy_api_key=...",
            id="missing key",
        ),
        pytest.param(
            "policy_url: x\na: http://${policy_ur}/\n",
            ":2, a: http://${policy_ur}/ needs 'policy_ur', which is not set\n"
            "Did you mean 'policy_url'? Otherwise: set it in ~/env.yaml, or on the command line: policy_ur=...",
            id="missing key, near to one",
        ),
        pytest.param(
            "a: {b: 1}\nc: ['${a.bb}']\n",
            ":2, c.0: ${a.bb} needs 'a.bb', which is not set\n"
            "Did you mean 'a.b'? Otherwise: set it on the command line: a.bb=...",
            id="missing key below another",
        ),
        pytest.param(
            "a: ${b}\nb: ${c}\n",
            ":1, a: ${b} needs 'c', which is not set\nSet it in ~/env.yaml, or on the command line: c=...",
            id="missing key at the end of a chain",
        ),
        pytest.param("a: {b: '${.c}'}", ":1, a.b: ${.c} needs '.c', which is not set", id="missing sibling"),
        pytest.param("a: ${a}", ":1, a: ${a} can't be resolved: recursive interpolation detected", id="itself"),
        pytest.param(
            "a: ${b}\nb: ${a}", ":1, a: ${b} can't be resolved: recursive interpolation detected", id="a circle"
        ),
        pytest.param(
            "a: ${",
            ":1, a: not a valid interpolation: '${'\nExpected ${key} or ${key.sub}; write \\${ for the two "
            "characters themselves.",
            id="not closed",
        ),
        pytest.param(
            "a: ${env:HOME}",
            ":1, a: ${env:HOME} asks for a resolver that does not exist\nFor an environment variable write "
            "${oc.env:NAME}.",
            id="unknown resolver",
        ),
        pytest.param(
            "a: ${oc.env:NEMO_GYM_TEST_NOT_SET}",
            ":1, a: ${oc.env:NEMO_GYM_TEST_NOT_SET} can't be resolved: "
            "\"Environment variable 'NEMO_GYM_TEST_NOT_SET' not found\"",
            id="environment variable not set",
        ),
        pytest.param(
            "a: ???",
            ":1, a: the value is not set yet (???)\nSet it in ~/env.yaml, or on the command line: a=...",
            id="value to be given",
        ),
        pytest.param(
            "a: ${b}\nb: ???",
            ":1, a: ${b} needs a value that is not set yet (???)\nSet it in ~/env.yaml, or on the command line: b=...",
            id="needs a value to be given",
        ),
    ],
)
def test_an_interpolation_that_can_not_be_resolved(failure: Failure, text: str, expected: str) -> None:
    assert failure(text) == f"~/config1.yaml{expected}"


@pytest.mark.parametrize(
    "override", ["", "abc", "=3", "+=3", "a..b=1", ".a=1", "a.=1", "a b=1", "--a=1", "~a", "~a=1", "+++a=1"]
)
def test_an_override_of_bad_syntax(failure: Failure, override: str) -> None:
    assert failure("a: 1", overrides=(override,)) == (
        f"command line: expected an override `key.sub=value`, got {override!r}\n"
        "For example: counter.resources_servers.example_session_state_mgmt.num_workers=4"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "a=[1",
            "a: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'\n"
            "Put the value in quotes if it is meant as text.",
        ),
        (
            "a=@x",
            "a: not valid YAML: while scanning for the next token, found character '@' that cannot start any token\n"
            "Put the value in quotes if it is meant as text.",
        ),
        ("a={b: 1, b: 2}", "a.b: the key stands twice in the same mapping\nKeep one of them."),
        (
            "counter.resources_servers.counter_env.entrypoint.x=1",
            f"{SETTINGS}.entrypoint.x: nothing can be set below '{SETTINGS}.entrypoint': it is a single value "
            "(~/config1.yaml:4), not a mapping",
        ),
        ("list.2=1", "list.2: '2' is no position in the list; it has 2 entries, counted from 0"),
        ("list.x.y=1", "list.x.y: 'x' is no position in the list; it has 2 entries, counted from 0"),
        (
            "countr.resources_servers.counter_env.num_workers=4",
            "countr.resources_servers.counter_env.num_workers: there is no 'countr' in the configuration\n"
            "Did you mean 'counter'? To add a new key nevertheless, begin the override with '+'.",
        ),
        (
            "counter.resource_servers.counter_env.num_workers=4",
            "counter.resource_servers.counter_env.num_workers: there is no 'resource_servers' in 'counter'\n"
            "Did you mean 'resources_servers'? To add a new key nevertheless, begin the override with '+'.",
        ),
        (
            f"{SETTINGS}.num_workers='4'",
            f"{SETTINGS}.num_workers: expected an integer of at least 1, got the text '4'\nWrite it without quotes.",
        ),
        (
            f"{SETTINGS}.num_workers=${{a}}0",
            f"{SETTINGS}.num_workers: expected an integer of at least 1, got the text '10' (from ${{a}}0)\n"
            "Write it without quotes.",
        ),
        (
            "+countr.resources_servers.counter_env.num_workers=0",
            "countr.resources_servers.counter_env.num_workers: expected an integer of at least 1, got the number 0",
        ),
        (
            "other.resources_servers.zzz.num_workers=4",
            "other.resources_servers.zzz: there is no folder 'zzz' in ~/resources_servers\nThere are: counter_env",
        ),
    ],
)
def test_an_override_that_can_not_be_used(failure: Failure, override: str, expected: str) -> None:
    text = COUNTER + "list: [1, 2]\na: 1\n"

    assert failure(text, overrides=(override,)) == f"command line, {expected}"


def test_errors_name_env_yaml_where_the_value_came_from_there(failure: Failure) -> None:
    assert failure(COUNTER, env="\npolicy_model_name: 3\n").startswith("~/env.yaml:2, policy_model_name: expected text")
    assert failure(COUNTER, env="a: [\n").startswith("~/env.yaml: not valid YAML at line 2, column 1: ")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reading fails, for root too")
def test_a_file_that_can_not_be_read(failure: Failure, tmp_path: Path) -> None:
    (tmp_path / "gone.yaml").symlink_to("/proc/self/mem")

    assert failure(paths=("gone.yaml",)).startswith("~/gone.yaml: the file can't be read: ")


def test_a_secret_is_not_shown_in_an_error(failure: Failure) -> None:
    text = "policy_api_key: sk-123\nother: {sub: 1}\n"

    assert "sk-123" not in failure(text, overrides=("policy_api_key.x=1",))
