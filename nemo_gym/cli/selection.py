"""Which configuration files and overrides a call's component flags mean.

`--resources-server NAME[/CONFIG]`, `--agent NAME`, `--model-type NAME` and `--config PATH` are shorthand: this module
turns them into the files and overrides that `load_global_config` takes, and nothing else. What the files
say is looked at only as far as needed to fill the gaps: an agent's resources server, and a policy model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nemo_gym.configuration.loading import merge, read_config_file
from nemo_gym.errors import UsageError, did_you_mean
from nemo_gym.global_config import POLICY_MODEL_KEY_NAME, GlobalConfig, load_global_config
from nemo_gym.paths import COMPONENT_KINDS, find_component, find_file, iter_components

DEFAULT_MODEL_TYPE: Final = "pattern_model"

FLAG_OF_KIND: Final = {
    "resources_servers": "--resources-server",
    "responses_api_agents": "--agent",
    "responses_api_models": "--model-type",
}
NOUN_OF_KIND: Final = {
    "resources_servers": "resources server",
    "responses_api_agents": "agent",
    "responses_api_models": "model type",
}

# The references of an added agent that are filled in: which key refers to which kind.
_REFERENCES: Final = {"resources_server": "resources_servers", "agent_server": "responses_api_agents"}


@dataclass(frozen=True, slots=True)
class Components:
    """The component flags of one call, as they were written.

    Args:
        resources_servers: Values of `--resources-server`.
        agent: The value of `--agent`.
        model_type: The value of `--model-type`.
        configs: Values of `--config`.
        overrides: The positional `key=value` arguments.
    """

    resources_servers: Sequence[str] = ()
    agent: str | None = None
    model_type: str | None = None
    configs: Sequence[str] = ()
    overrides: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.resources_servers or self.agent or self.model_type or self.configs)


@dataclass(frozen=True, slots=True)
class Selection:
    """What the flags mean.

    Args:
        config_paths: The files to merge, in order.
        overrides: The overrides to apply on them.
        agent: The agent instance that was named, where one was.
    """

    config_paths: list[Path]
    overrides: list[str] = field(default_factory=list)
    agent: str | None = None

    def load(self) -> GlobalConfig:
        """Return the resolved configuration.

        Raises:
            ConfigError: It can't be used.
        """
        return load_global_config(self.config_paths, self.overrides)


def select(components: Components) -> Selection:
    """Return the files and overrides that the flags mean.

    Raises:
        UsageError: Nothing was chosen, or a name is not known, or it is not clear which server an agent is for.
        ConfigError: A chosen file can't be read.
    """
    if not components:
        known = ", ".join(folder.name for folder in iter_components("resources_servers"))
        raise UsageError(
            "say what to run: --resources-server NAME, --agent NAME or --config PATH\n"
            f"Resources servers here: {known or 'none'}. `gym list` shows all components."
        )
    paths = [component_config("resources_servers", name) for name in components.resources_servers]
    paths += [_config_file(path) for path in components.configs]
    if components.model_type:
        paths.append(component_config("responses_api_models", components.model_type))
    overrides = list(components.overrides)
    agent = components.agent
    if agent is not None and not _has_agent(_peek(paths), agent):
        paths, added, agent = _compose_agent(paths, agent)
        overrides = added + overrides
    if not components.model_type and _lacks_policy_model(_peek(paths)):
        paths.append(component_config("responses_api_models", DEFAULT_MODEL_TYPE))
    return Selection(list(dict.fromkeys(paths)), overrides, agent)


def component_config(kind: str, name: str) -> Path:
    """Return the configuration file of the component `NAME[/CONFIG]`.

    Raises:
        UsageError: There is no such component, or it has no such configuration.
    """
    folder_name, _, config_name = name.partition("/")
    folder = component_folder(kind, folder_name)
    config_name = (config_name or folder_name).removesuffix(".yaml")
    path = folder / "configs" / f"{config_name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("configs/*.yaml"))
        hint = did_you_mean(config_name, known) or f"It has: {', '.join(known) or 'none'}."
        raise UsageError(f"{NOUN_OF_KIND[kind]} '{folder_name}' has no configuration '{config_name}'\n{hint}")
    return path


def component_folder(kind: str, name: str) -> Path:
    """Return the folder of a component.

    Raises:
        UsageError: There is none; with the nearest known name.
    """
    folder = find_component(kind, name) if name and Path(name).name == name else None
    if folder is None:
        known = {other: [found.name for found in iter_components(other)] for other in COMPONENT_KINDS}
        hint = did_you_mean(name, known[kind])
        elsewhere = next((other for other in COMPONENT_KINDS if name in known[other]), None)
        if elsewhere:
            hint = f"'{name}' is of another kind: {FLAG_OF_KIND[elsewhere]} {name}"
        hint = hint or f"Known: {', '.join(known[kind]) or 'none'}."
        raise UsageError(f"there is no {NOUN_OF_KIND[kind]} '{name}'\n{hint}")
    return folder


def _config_file(path: str) -> Path:
    found = find_file(path)
    if found is None:
        raise UsageError(f"--config {path}: there is no such file")
    return found


def _peek(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the files merged, neither resolved nor validated."""
    if not paths:
        return {}
    root, *others = (read_config_file(path) for path in paths)
    for other in others:
        root = merge(root, other)
    return dict(root.plain())


def iter_instances(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Yield name, kind, implementation and settings of what looks like a server instance."""
    for name, body in config.items():
        for kind in COMPONENT_KINDS:
            implementations = body.get(kind) if isinstance(body, dict) else None
            if isinstance(implementations, dict):
                for implementation, settings in implementations.items():
                    yield name, kind, implementation, settings if isinstance(settings, dict) else {}


def _has_agent(config: Mapping[str, Any], name: str) -> bool:
    return any((name, "responses_api_agents") == (found, kind) for found, kind, *_ in iter_instances(config))


def _compose_agent(paths: list[Path], name: str) -> tuple[list[Path], list[str], str]:
    """Add the agent implementation `name`, for the one resources server (or agent) that the other files define."""
    agents = [found for found, kind, *_ in iter_instances(_peek(paths)) if kind == "responses_api_agents"]
    if find_component("responses_api_agents", name.partition("/")[0]) is None and agents:
        implementations = [folder.name for folder in iter_components("responses_api_agents")]
        hint = did_you_mean(name, agents + implementations)
        raise UsageError(
            f"--agent {name}: the configuration has no agent of this name, and there is no such implementation\n"
            + (hint or f"The configuration has: {', '.join(agents)}. Implementations: {', '.join(implementations)}.")
        )
    path = component_config("responses_api_agents", name)
    own = [entry for entry in iter_instances(_peek([path])) if entry[1] == "responses_api_agents"]
    if len(own) != 1:
        raise UsageError(f"--agent {name}: {path} must define one agent, it defines {len(own)}; use --config")
    instance, kind, implementation, settings = own[0]
    overrides = []
    for reference, wanted in _REFERENCES.items():
        candidates = [found for found, other, *_ in iter_instances(_peek(paths)) if other == wanted]
        if not candidates or reference not in settings or settings[reference].get("name") in candidates:
            continue
        key = f"{instance}.{kind}.{implementation}.{reference}.name"
        if len(candidates) > 1:
            raise UsageError(
                f"--agent {name}: for which {NOUN_OF_KIND[wanted]}? The configuration has {', '.join(candidates)}\n"
                f"Set {key} in a --config file that defines the agent."
            )
        overrides.append(f"{key}={candidates[0]}")
    return [*paths, path], overrides, instance


def _lacks_policy_model(config: Mapping[str, Any]) -> bool:
    if POLICY_MODEL_KEY_NAME in config:
        return False
    return any(_refers_to_policy_model(settings) for *_, settings in iter_instances(config))


def _refers_to_policy_model(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("name") == POLICY_MODEL_KEY_NAME or any(map(_refers_to_policy_model, value.values()))
    return isinstance(value, list) and any(map(_refers_to_policy_model, value))
