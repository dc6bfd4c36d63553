"""Files + overrides + environment -> one resolved, validated configuration.

`load_global_config` is for the parent process, which reads files. Server processes and user code call
`get_global_config_dict`, which reads what the parent resolved from `NEMO_GYM_CONFIG_DICT`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, ClassVar, Final

from omegaconf import DictConfig as DictConfig, OmegaConf as OmegaConf
from pydantic import BaseModel, ConfigDict

from nemo_gym.config_types import SERVER_KINDS, BaseRunServerInstanceConfig, ServerInstance, ServerKind
from nemo_gym.configuration.addresses import Listener, assign_addresses, find_open_port as find_open_port
from nemo_gym.configuration.interpolation import as_config, referred_keys, resolve
from nemo_gym.configuration.loading import Node, apply_override, dump_yaml, merge, parse_yaml, read_config_file
from nemo_gym.configuration.observability import TRACING_KEY_NAME, check_logging, check_tracing
from nemo_gym.configuration.validation import Checker, FoundInstance
from nemo_gym.errors import ConfigError, did_you_mean
from nemo_gym.logs.setup import LOGGING_KEY_NAME
from nemo_gym.paths import component_roots, find_file

NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME: Final = "NEMO_GYM_CONFIG_DICT"
NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME: Final = "NEMO_GYM_CONFIG_PATH"

TASK_INDEX_KEY_NAME: Final = "_ng_task_index"
ROLLOUT_INDEX_KEY_NAME: Final = "_ng_rollout_index"
ATTEMPT_INDEX_KEY_NAME: Final = "_ng_attempt_index"
ROLLOUT_SECONDS_KEY_NAME: Final = "_ng_rollout_seconds"
AGENT_REF_KEY_NAME: Final = "agent_ref"

HEAD_SERVER_KEY_NAME: Final = "head_server"
DRY_RUN_KEY_NAME: Final = "dry_run"
CACHE_DIR_KEY_NAME: Final = "cache_dir"
RESULTS_DIR_KEY_NAME: Final = "results_dir"
DISALLOWED_PORTS_KEY_NAME: Final = "disallowed_ports"
POLICY_MODEL_KEY_NAME: Final = "policy_model"
POLICY_BASE_URL_KEY_NAME: Final = "policy_base_url"
POLICY_API_KEY_KEY_NAME: Final = "policy_api_key"
POLICY_MODEL_NAME_KEY_NAME: Final = "policy_model_name"
SESSION_SECRET_KEY_NAME: Final = "session_secret"
MIN_SECRET_LENGTH: Final = 16

ENV_FILE_NAME: Final = "env.yaml"

_TEXT_KEYS: Final = (CACHE_DIR_KEY_NAME, RESULTS_DIR_KEY_NAME, POLICY_API_KEY_KEY_NAME, POLICY_MODEL_NAME_KEY_NAME)
_KNOWN_KEYS: Final = frozenset(
    {
        HEAD_SERVER_KEY_NAME,
        DRY_RUN_KEY_NAME,
        DISALLOWED_PORTS_KEY_NAME,
        POLICY_MODEL_KEY_NAME,
        POLICY_BASE_URL_KEY_NAME,
        SESSION_SECRET_KEY_NAME,
        LOGGING_KEY_NAME,
        TRACING_KEY_NAME,
        *_TEXT_KEYS,
        *BaseRunServerInstanceConfig.model_fields,
    }
)
"""Keys that an override may add although they may look like a slip for one that is there."""

_SECRET_ENDINGS: Final = ("api_key", "token", "secret", "password")
_MASK: Final = "***"
_SHORTEST_SECRET: Final = 8
"""Values shorter than this (`EMPTY`, `dummy`) are masked at their own key, but not looked for elsewhere."""


@dataclass(frozen=True)
class GlobalConfig:
    """The resolved, validated configuration.

    Args:
        config_dict: All of it; every instance has host, port and num_workers, the head server host and port.
        instances: The server instances by name, in the order of writing.
        sources: The files it came from, in the order of merging.
    """

    config_dict: DictConfig
    instances: Mapping[str, ServerInstance]
    sources: list[Path] = field(default_factory=list)

    def to_yaml(self, *, mask_secrets: bool = False) -> str:
        """Return the configuration as YAML that loads again to the same values.

        Args:
            mask_secrets: Replace values whose key ends with api_key, token, secret or password by `***`, also
                where such a value is part of another.
        """
        if not mask_secrets:
            return dump_yaml(OmegaConf.to_container(self.config_dict, resolve=False))
        values = _masked(OmegaConf.to_container(self.config_dict, resolve=True))
        return dump_yaml(OmegaConf.to_container(as_config(values), resolve=False))

    def to_json(self) -> str:
        """Return the configuration as the ASCII JSON text that server processes get in `NEMO_GYM_CONFIG_DICT`."""
        return json.dumps(OmegaConf.to_container(self.config_dict, resolve=False))

    def select(self, kind: ServerKind) -> list[ServerInstance]:
        """Return the instances of one kind, in the order of writing."""
        return [instance for instance in self.instances.values() if instance.kind == kind]


def load_global_config(
    config_paths: Sequence[str | Path], overrides: Sequence[str] = (), *, working_dir: Path | None = None
) -> GlobalConfig:
    """Read, merge, resolve and validate a configuration, and choose the ports that were left out.

    Files are merged in order, then `env.yaml` of the working directory where there is one, then the overrides.

    Args:
        config_paths: YAML files; a relative path is looked for in the working directory first, then where
            components are.
        overrides: `key.sub=value`, the value read as YAML; with a leading `+` also for a key that looks like a
            slip for an existing one.
        working_dir: The user's folder; the process's working directory when None.

    Raises:
        ConfigError: Something is wrong with it; the text names the file, the key and what was expected.
    """
    working_dir = (working_dir or Path.cwd()).resolve()
    sources = list(dict.fromkeys(_find_config(path, working_dir) for path in config_paths))
    layers = [read_config_file(path) for path in sources]
    env_file = working_dir / ENV_FILE_NAME
    if env_file.is_file():
        layers.append(read_config_file(env_file, may_be_empty=True))
        sources.append(env_file)
    return _build(layers, overrides, working_dir, sources)


def get_global_config_dict() -> DictConfig:
    """Return the configuration that this server process was started with.

    Raises:
        ConfigError: The process was not started by `gym`, or with unusable text.
    """
    config = maybe_get_global_config_dict()
    if config is None:
        raise ConfigError(
            f"the environment variable {NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME} is not set: this process was not started "
            "as a server of a running configuration",
            hint="Start the servers with `gym env start`.",
        )
    return config


def secrets_in(config: DictConfig) -> set[str]:
    """Return the values whose key ends with api_key, token, secret or password, save those that are very short."""
    return _secrets(OmegaConf.to_container(config, resolve=True))


def maybe_get_global_config_dict() -> DictConfig | None:
    """Return the configuration that this server process was started with, or None outside of one."""
    text = os.environ.get(NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME)
    return _parse_config_text(text) if text else None


def get_first_server_config_dict(global_config_dict: DictConfig, name: str) -> DictConfig:
    """Return the settings of the instance `name`: `global_config_dict[name][kind][implementation]`.

    Raises:
        ConfigError: There is no such instance.
    """
    instance = global_config_dict.get(name)
    if isinstance(instance, DictConfig):
        for kind in SERVER_KINDS:
            implementations = instance.get(kind)
            if isinstance(implementations, DictConfig) and implementations:
                settings = next(iter(implementations.values()))
                if isinstance(settings, DictConfig):
                    return settings
    names = [str(key) for key, value in global_config_dict.items() if _is_instance(value)]
    hint = did_you_mean(name, names) or f"There are: {', '.join(names) or 'none'}"
    raise ConfigError("the configuration has no server instance of this name", key=name, hint=hint)


class GlobalConfigDictParserConfig(BaseModel):
    """What `GlobalConfigDictParser` reads.

    Args:
        dotenv_path: The file of secrets and endpoints; `env.yaml` in the working directory when None.
        initial_global_config_dict: The configuration itself.
        skip_load_from_cli: Accepted for compatibility; the command line is never read here.
        skip_load_from_dotenv: Whether to leave the file of secrets out.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    NO_MODEL_GLOBAL_CONFIG_DICT: ClassVar[DictConfig] = OmegaConf.create(
        {POLICY_BASE_URL_KEY_NAME: "", POLICY_API_KEY_KEY_NAME: "", POLICY_MODEL_NAME_KEY_NAME: ""}
    )

    dotenv_path: Path | None = None
    initial_global_config_dict: DictConfig | dict[str, Any] | None = None
    skip_load_from_cli: bool = False
    skip_load_from_dotenv: bool = False


class GlobalConfigDictParser:
    """The door through which existing environments load a configuration that is not in files."""

    def parse(self, parse_config: GlobalConfigDictParserConfig | None = None) -> DictConfig:
        """Return the resolved configuration.

        Raises:
            ConfigError: Something is wrong with it.
        """
        parse_config = parse_config or GlobalConfigDictParserConfig()
        layers, sources = [], []
        if parse_config.initial_global_config_dict is not None:
            text = OmegaConf.to_yaml(OmegaConf.create(parse_config.initial_global_config_dict))
            layers.append(parse_yaml(text, "initial_global_config_dict", with_lines=False) or Node({}, ""))
        env_file = parse_config.dotenv_path or Path.cwd() / ENV_FILE_NAME
        if not parse_config.skip_load_from_dotenv and env_file.is_file():
            layers.append(read_config_file(env_file, may_be_empty=True))
            sources.append(env_file)
        return _build(layers, (), Path.cwd(), sources).config_dict

    def parse_no_environment(self, initial_global_config_dict: DictConfig | None = None) -> DictConfig:
        """Return the resolved configuration of a mapping alone."""
        return self.parse(
            GlobalConfigDictParserConfig(
                initial_global_config_dict=initial_global_config_dict,
                skip_load_from_cli=True,
                skip_load_from_dotenv=True,
            )
        )


def _build(layers: Sequence[Node], overrides: Sequence[str], working_dir: Path, sources: list[Path]) -> GlobalConfig:
    root = reduce(merge, layers, Node({}, ""))
    known_keys = _KNOWN_KEYS | referred_keys(root)
    for override in overrides:
        root = apply_override(root, override, known_keys)
    values = resolve(root, working_dir / ENV_FILE_NAME)
    checker = Checker(root, values, working_dir)
    _check_reserved(checker)
    found = checker.find_instances()
    checker.check_references(found)
    head = values[HEAD_SERVER_KEY_NAME] = values.get(HEAD_SERVER_KEY_NAME) or {}
    listeners: list[Listener] = [((HEAD_SERVER_KEY_NAME,), head)]
    listeners += [(instance.path, instance.settings) for instance in found]
    assign_addresses(root, listeners, values.get(DISALLOWED_PORTS_KEY_NAME) or ())
    instances = {instance.name: _server_instance(instance) for instance in found}
    return GlobalConfig(config_dict=as_config(values), instances=instances, sources=sources)


def _check_reserved(checker: Checker) -> None:
    """Check the top-level values that the framework reads itself. Those of secrets are not shown."""
    values = checker.values
    head = values.get(HEAD_SERVER_KEY_NAME)
    checker.typed(head, (HEAD_SERVER_KEY_NAME,), dict, "a mapping of host and port")
    checker.port((head or {}).get("port"), (HEAD_SERVER_KEY_NAME, "port"))
    checker.typed(values.get(DRY_RUN_KEY_NAME), (DRY_RUN_KEY_NAME,), bool, "true or false")
    for key in _TEXT_KEYS:
        if not isinstance(values.get(key), str | None):
            raise checker.error("expected text", (key,), "Put the value in quotes.")
    secrets = values.get(SESSION_SECRET_KEY_NAME)
    several = secrets if isinstance(secrets, list) and secrets else [secrets]
    if secrets is not None and not all(isinstance(it, str) and len(it) >= MIN_SECRET_LENGTH for it in several):
        problem = f"expected a text of at least {MIN_SECRET_LENGTH} characters, or a list of such, newest first"
        hint = "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        raise checker.error(problem, (SESSION_SECRET_KEY_NAME,), hint)
    ports = values.get(DISALLOWED_PORTS_KEY_NAME)
    checker.typed(ports, (DISALLOWED_PORTS_KEY_NAME,), list, "a list of ports")
    for position, port in enumerate(ports or ()):
        checker.port(port, (DISALLOWED_PORTS_KEY_NAME, str(position)))
    check_logging(checker)
    check_tracing(checker)


def _server_instance(found: FoundInstance) -> ServerInstance:
    settings = found.settings
    if settings.get("num_workers") is None:
        settings["num_workers"] = 1
    return ServerInstance(
        name=found.name,
        kind=found.kind,
        implementation=found.implementation,
        entrypoint=settings["entrypoint"],
        host=settings["host"],
        port=settings["port"],
        num_workers=settings["num_workers"],
        folder=found.folder,
        settings=settings,
    )


def _find_config(path: str | Path, working_dir: Path) -> Path:
    found = find_file(path, working_dir)
    if found is not None:
        return found
    wanted = Path(path).expanduser()
    if (working_dir / wanted).is_dir():
        raise ConfigError("expected a YAML file, this is a folder", source=working_dir / wanted)
    bases = [Path(wanted.anchor)] if wanted.is_absolute() else component_roots(working_dir)
    problem = "there is no such file"
    if not wanted.is_absolute():
        problem = f"{problem} in {', '.join(map(str, bases))}"
    near = (_nearest_file(base, wanted.relative_to(wanted.anchor)) for base in bases)
    raise ConfigError(problem, source=path, hint=next((hint for hint in near if hint), None))


def _nearest_file(base: Path, wanted: Path) -> str | None:
    """Return a "did you mean" for the first part of the path `wanted` that `base` does not have."""
    folder = base
    for part in wanted.parts:
        if (folder / part).exists():
            folder /= part
            continue
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        near = did_you_mean(part, [name for name in names if not name.startswith(".")])
        return f"{near} (in {folder})" if near else None
    return None


@lru_cache(maxsize=4)
def _parse_config_text(text: str) -> DictConfig:
    try:
        values = json.loads(text)
    except ValueError:
        node = parse_yaml(text, NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME)
        values = node.plain() if node else None
    if not isinstance(values, dict):
        raise ConfigError("expected a mapping as YAML or JSON", source=NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME)
    config: DictConfig = OmegaConf.create(values)
    return config


def _is_instance(value: Any) -> bool:
    return isinstance(value, DictConfig) and any(kind in value for kind in SERVER_KINDS)


def _is_secret(key: str) -> bool:
    return key.lower().endswith(_SECRET_ENDINGS)


def _secrets(value: Any, *, inside: bool = False) -> set[str]:
    if isinstance(value, dict):
        return {secret for key, child in value.items() for secret in _secrets(child, inside=inside or _is_secret(key))}
    if isinstance(value, list):
        return {secret for child in value for secret in _secrets(child, inside=inside)}
    return {value} if inside and isinstance(value, str) and len(value) >= _SHORTEST_SECRET else set()


def _masked(plain: Any) -> Any:
    secrets = sorted(_secrets(plain), key=len, reverse=True)

    def mask(value: Any, *, inside: bool) -> Any:
        if isinstance(value, dict):
            return {key: mask(child, inside=inside or _is_secret(key)) for key, child in value.items()}
        if isinstance(value, list):
            return [mask(child, inside=inside) for child in value]
        if inside:
            return value if value is None or isinstance(value, bool) else _MASK
        if isinstance(value, str):
            return reduce(lambda text, secret: text.replace(secret, _MASK), secrets, value)
        return value

    return mask(plain, inside=False)
