"""Resolved values -> server instances: their settings, folders and references to each other checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from nemo_gym.config_types import (
    DATASET_TYPES,
    SERVER_KINDS,
    SESSION_HOPS,
    SESSION_PLACEMENTS,
    Domain,
    ServerKind,
)
from nemo_gym.configuration.loading import KeyPath, Node, describe, slip_for
from nemo_gym.errors import ConfigError, did_you_mean
from nemo_gym.paths import component_roots, find_component, iter_components

DEFAULT_ENTRYPOINT: Final = "app.py"

_INSTANCE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_RESERVED_NAMES: Final = ("head_server",)
_KIND_EXPECTED: Final = f"expected exactly one of {', '.join(SERVER_KINDS)}"
_CHOICES: Final = {"session_placement": SESSION_PLACEMENTS, "session_hop": SESSION_HOPS}


@dataclass(frozen=True)
class FoundInstance:
    """A server instance as it stands in the configuration.

    Args:
        name: Its key at the top of the configuration.
        kind: The kind of server.
        implementation: The implementation's name.
        folder: The implementation's folder.
        settings: Its mapping within the resolved values, not a copy.
    """

    name: str
    kind: ServerKind
    implementation: str
    folder: Path
    settings: dict[str, Any]

    @property
    def path(self) -> KeyPath:
        """The path of `settings` within the configuration."""
        return (self.name, self.kind, self.implementation)


class Checker:
    """Checks resolved values. Every method raises ConfigError at the first value that can't be used.

    Args:
        root: The merged configuration before interpolation; it knows where each value was written.
        values: The resolved values.
        working_dir: The folder in which components are looked for first.
    """

    def __init__(self, root: Node, values: dict[str, Any], working_dir: Path) -> None:
        self.root = root
        self.values = values
        self.working_dir = working_dir

    def error(self, problem: str, path: KeyPath, hint: str | None = None) -> ConfigError:
        """Return the error for the value at `path`, telling also the interpolation it came from."""
        written = self.root.nearest(path).value
        if isinstance(written, str) and "${" in written:
            problem = f"{problem} (from {written})"
        return self.root.error(problem, path, hint)

    def integer(self, value: Any, path: KeyPath, lowest: int, highest: int | None = None) -> None:
        """Check that a value, where there is one, is an integer within bounds; `true` and `"4"` are none."""
        if value is None:
            return
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < lowest or (highest is not None and value > highest):
            bounds = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            hint = "Write it without quotes." if isinstance(value, str) and value.isdecimal() else None
            raise self.error(f"expected an integer {bounds}, got {describe(value)}", path, hint)

    def typed(self, value: Any, path: KeyPath, expected: type, words: str) -> None:
        """Check that a value, where there is one, is of the type `expected`, called `words`."""
        if value is not None and not isinstance(value, expected):
            raise self.error(f"expected {words}, got {describe(value)}", path)

    def one_of(self, value: Any, path: KeyPath, names: Sequence[str]) -> None:
        """Check that a value is one of `names`."""
        if value not in names:
            hint = did_you_mean(value, names) if isinstance(value, str) else None
            raise self.error(f"expected one of {', '.join(names)}, got {describe(value)}", path, hint)

    def port(self, value: Any, path: KeyPath) -> None:
        """Check that a value, where there is one, is a TCP port."""
        self.integer(value, path, 1, 65535)

    def find_instances(self) -> list[FoundInstance]:
        """Return the server instances in the order of writing, their settings checked, `entrypoint` filled in."""
        kinds = {name: self._kind_of(name, value) for name, value in self.values.items()}
        instances = [self._instance(name, kind) for name, kind in kinds.items() if kind is not None]
        for instance in instances:
            self._check_settings(instance)
        return instances

    def check_references(self, instances: list[FoundInstance]) -> None:
        """Check that each `{type: <kind>, name: <instance>}` in an instance's settings leads to an instance."""
        kinds = {instance.name: instance.kind for instance in instances}
        for instance in instances:
            for path, mapping in _mappings(instance.settings, instance.path):
                self._check_reference(mapping, path, kinds)

    def _kind_of(self, name: str, value: Any) -> ServerKind | None:
        """Return the kind of a top-level value that is a server instance; None for any other value."""
        if not isinstance(value, dict):
            return None
        if _is_kind(name):
            example = next(iter(value), "<implementation>")
            raise self.error(
                "the instance's name is missing above the server type", (name,), f"Write: my_{example}: {{{name}: ...}}"
            )
        kinds = [key for key in value if _is_kind(key)]
        if len(kinds) > 1:
            raise self.error(
                f"{_KIND_EXPECTED}, got {self._listed((name,), kinds)}", (name,), "Give each its own instance name."
            )
        if not kinds:
            self._check_plain_mapping(name, value)
            return None
        other = next((key for key in value if key != kinds[0]), None)
        if other is not None:
            hint = f"Settings of the server stand below {name}.{kinds[0]}.<implementation>."
            raise self.error(f"unexpected key beside '{kinds[0]}'", (name, other), hint)
        return kinds[0]

    def _check_plain_mapping(self, name: str, value: dict[str, Any]) -> None:
        """Refuse a mapping that was surely meant as a server instance."""
        for key, below in value.items():
            near = slip_for(key, SERVER_KINDS) if len(value) == 1 else None
            if near or _has_entrypoint(below):
                kind = next((kind for kind in SERVER_KINDS if find_component(kind, key, self.working_dir)), None)
                hint = f"Write: {name}: {{{kind}: {{{key}: ...}}}}" if kind else did_you_mean(key, SERVER_KINDS)
                raise self.error(f"unknown server type '{key}'; {_KIND_EXPECTED}", (name, key), hint)

    def _instance(self, name: str, kind: ServerKind) -> FoundInstance:
        path = (name, kind)
        if name in _RESERVED_NAMES:
            raise self.error(f"'{name}' has a meaning of its own and can't be an instance's name", path)
        if not _INSTANCE_NAME.fullmatch(name):
            problem = f"{name!r} can't be an instance's name; expected letters, digits, '_', '-' and '.'"
            raise self.error(problem, path)
        implementations = self.values[name][kind]
        expected = "expected a mapping of one implementation's name to its settings"
        if not isinstance(implementations, dict) or not implementations:
            example = implementations if isinstance(implementations, str) else "<implementation>"
            hint = f"Write: {example}: {{entrypoint: {DEFAULT_ENTRYPOINT}}}"
            raise self.error(f"{expected}, got {describe(implementations)}", path, hint)
        if len(implementations) > 1:
            found = self._listed(path, [*implementations])
            raise self.error(f"{expected}, got {found}", path, "Give each its own instance name.")
        implementation, settings = next(iter(implementations.items()))
        if not isinstance(settings, dict):
            hint = f"Write: {implementation}: {{entrypoint: {DEFAULT_ENTRYPOINT}}}"
            raise self.error(f"expected a mapping of settings, got {describe(settings)}", (*path, implementation), hint)
        return FoundInstance(name, kind, implementation, self._folder(kind, implementation, path), settings)

    def _listed(self, path: KeyPath, keys: Sequence[str]) -> str:
        return " and ".join(f"'{key}' ({self.root.nearest((*path, key)).origin})" for key in keys)

    def _folder(self, kind: ServerKind, implementation: str, path: KeyPath) -> Path:
        folder = find_component(kind, implementation, self.working_dir)
        if folder is not None:
            return folder
        names = [found.name for found in iter_components(kind, self.working_dir)]
        hint = did_you_mean(implementation, names) or (f"There are: {', '.join(names)}" if names else None)
        looked = ", ".join(str(root / kind) for root in component_roots(self.working_dir))
        raise self.error(f"there is no folder '{implementation}' in {looked}", (*path, implementation), hint)

    def _check_settings(self, instance: FoundInstance) -> None:
        settings, path = instance.settings, instance.path
        _drop_null(settings, "verified")
        for key in settings:
            near = slip_for(key, ("num_workers", "entrypoint"), likeness=0.9)
            if near and key != near:
                raise self.error("unknown setting", (*path, key), f"Did you mean '{near}'?")
        self.port(settings.get("port"), (*path, "port"))
        for key, lowest in (("num_workers", 1), ("shutdown_grace_s", 0), ("worker_health_timeout_s", 1)):
            self.integer(settings.get(key), (*path, key), lowest)
        for key in ("shutdown_grace_s", "worker_health_timeout_s", *_CHOICES, "expose_tools_over_mcp"):
            _drop_null(settings, key)
        if settings.get("entrypoint") is None:
            settings["entrypoint"] = DEFAULT_ENTRYPOINT
        self.typed(settings["entrypoint"], (*path, "entrypoint"), str, "the name of a Python file")
        self._check_entrypoint(instance)
        self.typed(settings.get("description"), (*path, "description"), str, "text")
        for key in ("verified", "expose_tools_over_mcp"):
            self.typed(settings.get(key), (*path, key), bool, "true or false")
        if settings.get("domain") is not None:
            self.one_of(settings["domain"], (*path, "domain"), [str(member) for member in Domain])
        for key, choices in _CHOICES.items():
            if settings.get(key) is not None:
                self.one_of(settings[key], (*path, key), choices)
        self._check_datasets(settings.get("datasets"), (*path, "datasets"))

    def _check_entrypoint(self, instance: FoundInstance) -> None:
        entrypoint = instance.settings["entrypoint"]
        if not (instance.folder / entrypoint).is_file():
            files = sorted(file.name for file in instance.folder.glob("*.py"))
            hint = did_you_mean(entrypoint, files) or (f"There is {', '.join(files)}." if files else None)
            problem = f"there is no file '{entrypoint}' in {instance.folder}"
            raise self.error(problem, (*instance.path, "entrypoint"), hint)

    def _check_datasets(self, datasets: Any, path: KeyPath) -> None:
        self.typed(datasets, path, list, "a list of datasets")
        for position, dataset in enumerate(datasets or ()):
            below = (*path, str(position))
            if not isinstance(dataset, dict):
                problem = f"expected a mapping with name, type and jsonl_fpath, got {describe(dataset)}"
                raise self.error(problem, below)
            for key in ("name", "jsonl_fpath"):
                if not isinstance(dataset.get(key), str):
                    raise self.error(f"expected text, got {describe(dataset.get(key))}", (*below, key))
            self.one_of(dataset.get("type"), (*below, "type"), DATASET_TYPES)
            self.integer(dataset.get("num_repeats"), (*below, "num_repeats"), 1)
            _drop_null(dataset, "num_repeats")

    def _check_reference(self, mapping: dict[str, Any], path: KeyPath, kinds: dict[str, ServerKind]) -> None:
        kind, name = mapping["type"], mapping.get("name")
        if not isinstance(kind, str):
            return
        if not _is_kind(kind):
            near = slip_for(kind, SERVER_KINDS)
            if near and "name" in mapping:
                problem = f"unknown server type '{kind}'; {_KIND_EXPECTED}"
                raise self.error(problem, (*path, "type"), f"Did you mean '{near}'?")
            return
        if not isinstance(name, str):
            problem = f"a reference of type {kind} needs the name of an instance, got {describe(name)}"
            raise self.error(problem, (*path, "name"))
        if name not in kinds:
            same_kind = [other for other, other_kind in kinds.items() if other_kind == kind]
            hint = did_you_mean(name, same_kind)
            if hint is None:
                hint = f"There are: {', '.join(same_kind)}" if same_kind else f"The configuration has no {kind}."
            raise self.error(f"there is no server instance '{name}' of type {kind}", (*path, "name"), hint)
        if kinds[name] != kind:
            hint = f"Write type: {kinds[name]}, or name an instance of {kind}."
            raise self.error(f"'{name}' is of type {kinds[name]}, not {kind}", (*path, "type"), hint)


def _is_kind(key: str) -> TypeGuard[ServerKind]:
    return key in SERVER_KINDS


def _drop_null(mapping: dict[str, Any], key: str) -> None:
    """Leave out a null: the typed configuration has a default for the key, but no None."""
    if mapping.get(key, "") is None:
        del mapping[key]


def _has_entrypoint(value: Any) -> bool:
    """Tell whether `value` looks like one implementation's settings, or like a mapping of such."""
    if not isinstance(value, dict):
        return False
    return "entrypoint" in value or any(isinstance(child, dict) and "entrypoint" in child for child in value.values())


def _mappings(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield each mapping that has a `type`, at any depth, with its path."""
    if isinstance(value, dict):
        if "type" in value:
            yield path, value
        for key, child in value.items():
            yield from _mappings(child, (*path, key))
    elif isinstance(value, list):
        for position, child in enumerate(value):
            yield from _mappings(child, (*path, str(position)))
