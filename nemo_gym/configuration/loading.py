"""Configuration text -> one tree of values in which every value knows the file and line it came from.

YAML 1.1 as PyYAML reads it, with four differences: a key that stands twice in one mapping is an error instead of
a silent loss; keys are text; `1e-3` is a number, as in YAML 1.2; dates stay text, for the configuration travels as
JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml  # type: ignore[import-untyped]

from nemo_gym.errors import ConfigError

Scalar: TypeAlias = str | int | float | bool | None
KeyPath: TypeAlias = tuple[str, ...]

COMMAND_LINE: Final = "command line"

_OVERRIDE: Final = re.compile(r"(?P<add>\+{0,2})(?P<key>[^\s=.+~-][^\s=]*)=(?P<value>.*)", re.DOTALL)
_MAX_DEPTH: Final = 40


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the configuration and where it was written.

    Args:
        value: A mapping or list of nodes, or a scalar.
        origin: `<file>:<line>`, or `command line`.
    """

    value: dict[str, Node] | list[Node] | Scalar
    origin: str

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def nearest(self, path: KeyPath) -> Node:
        """Return the node at `path`, or its nearest ancestor that was written down."""
        node = self
        for key in path:
            child = node.child(key)
            if child is None:
                break
            node = child
        return node

    def child(self, key: str) -> Node | None:
        """Return the node below this one under `key` (a list's keys are its positions), or None."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def scalars(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """Yield each scalar below this node with its path, in the order of writing."""
        if isinstance(self.value, dict):
            for key, child in self.value.items():
                yield from child.scalars((*path, key))
        elif isinstance(self.value, list):
            for position, child in enumerate(self.value):
                yield from child.scalars((*path, str(position)))
        else:
            yield path, self

    def error(self, problem: str, path: KeyPath, hint: str | None = None) -> ConfigError:
        """Return the error that names the value at `path` below this root, and the file it came from."""
        return ConfigError(problem, source=self.nearest(path).origin or None, key=".".join(path), hint=hint)


def describe(value: Any) -> str:
    """Return what a value is, in a user's words and shortened: `the text 'abc'`, `a list`."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"the truth value {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {value if len(value) <= 40 else value[:37] + '...'!r}"
        case dict():
            return f"a mapping of {', '.join(list(value)[:5])}" if value else "an empty mapping"
        case _:
            return "a list"


def slip_for(name: str, candidates: Iterable[str], *, likeness: float = 0.8) -> str | None:
    """Return the candidate so like `name` that `name` is taken for a slip of the keyboard, or None.

    Args:
        name: What was written.
        candidates: What could have been meant.
        likeness: The least difflib ratio, from 0 to 1.
    """
    return next(iter(get_close_matches(name, list(candidates), n=1, cutoff=likeness)), None)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader with the scalars of the module's docstring."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes all text that this loader or PyYAML's would take for something else."""

    def text(self, text: str) -> Any:
        # PyYAML loses these line breaks of Unicode unless they are escaped, which only double quotes do.
        style = '"' if _ODD_LINE_BREAK.search(text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_FLOAT_TAG: Final = "tag:yaml.org,2002:float"
_FLOAT: Final = re.compile(
    r"[-+]?[0-9][0-9_]*(\.[0-9_]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9][0-9_]*|[-+]?\.inf|\.nan", re.IGNORECASE
)
_ODD_LINE_BREAK: Final = re.compile("[\x85\u2028\u2029]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_TEXT_TAGS: Final = (_FLOAT_TAG, "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")

_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _TEXT_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Dumper.add_representer(str, _Dumper.text)
for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(
        _FLOAT_TAG, re.compile(rf"(?:{_FLOAT.pattern})$", re.IGNORECASE), list("-+.0123456789")
    )


class _Reader:
    """Turns the nodes that PyYAML composes into ours; an alias gives the very node of its anchor."""

    def __init__(self, loader: Any, source: str, *, with_lines: bool) -> None:
        self.loader = loader
        self.source = source
        self.with_lines = with_lines
        self.finished: dict[int, Node] = {}
        self.open: set[int] = set()

    def origin(self, yaml_node: Any) -> str:
        return f"{self.source}:{yaml_node.start_mark.line + 1}" if self.with_lines else self.source

    def read(self, yaml_node: Any, path: KeyPath) -> Node:
        done = self.finished.get(id(yaml_node))
        if done is not None:
            return done
        origin = self.origin(yaml_node)
        if len(path) > _MAX_DEPTH:
            raise ConfigError(f"nested too deeply, more than {_MAX_DEPTH} levels", source=origin, key=path[0])
        if id(yaml_node) in self.open:
            raise ConfigError("the value contains itself, through a YAML alias", source=origin, key=".".join(path))
        self.open.add(id(yaml_node))
        value: dict[str, Node] | list[Node] | Scalar
        if isinstance(yaml_node, yaml.MappingNode):
            value = self.mapping(yaml_node, path)
        elif isinstance(yaml_node, yaml.SequenceNode):
            value = [self.read(item, (*path, str(position))) for position, item in enumerate(yaml_node.value)]
        else:
            value = self.scalar(yaml_node, path)
        self.open.remove(id(yaml_node))
        self.finished[id(yaml_node)] = Node(value, origin)
        return self.finished[id(yaml_node)]

    def mapping(self, yaml_node: Any, path: KeyPath) -> dict[str, Node]:
        lines: dict[str, int] = {}
        for key_node, _ in yaml_node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.key(key_node, path)
            if key in lines:
                first = f", first in line {lines[key]}" if self.with_lines else ""
                raise ConfigError(
                    f"the key stands twice in the same mapping{first}",
                    source=self.origin(key_node),
                    key=".".join((*path, key)),
                    hint="Keep one of them.",
                )
            lines[key] = key_node.start_mark.line + 1
        self.loader.flatten_mapping(yaml_node)
        children = {}
        for key_node, value_node in yaml_node.value:
            key = self.key(key_node, path)
            children[key] = Node(self.read(value_node, (*path, key)).value, self.origin(key_node))
        return children

    def key(self, yaml_node: Any, path: KeyPath) -> str:
        if not isinstance(yaml_node, yaml.ScalarNode):
            raise ConfigError(
                f"a key must be text, got a {yaml_node.id}", source=self.origin(yaml_node), key=".".join(path)
            )
        key = self.scalar(yaml_node, path)
        if isinstance(key, str):
            return key
        raise ConfigError(
            f"a key must be text, got {describe(key)}",
            source=self.origin(yaml_node),
            key=".".join(path),
            hint=f'Put it in quotes: "{yaml_node.value}"',
        )

    def scalar(self, yaml_node: Any, path: KeyPath) -> Scalar:
        try:
            value = self.loader.construct_object(yaml_node)
        except ValueError as error:
            raise ConfigError(
                f"not a valid value: {error}", source=self.origin(yaml_node), key=".".join(path)
            ) from error
        if isinstance(value, float) and not math.isfinite(value):
            problem = f"expected a finite number, got {yaml_node.value}"
        elif isinstance(value, str) and _SURROGATE.search(value):
            # JSON writes a character beyond the first 65536 as two escapes, which YAML reads as two characters.
            try:
                return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError:
                problem = f"half of a UTF-16 surrogate pair is no character: {value!a}"
        elif value is None or isinstance(value, str | int | float | bool):
            return value
        else:
            problem = f"values of the YAML tag {yaml_node.tag!r} can't be used"
        raise ConfigError(problem, source=self.origin(yaml_node), key=".".join(path))


def parse_yaml(text: str, source: str, *, key: str | None = None, with_lines: bool = True) -> Node | None:
    """Return the tree that YAML text describes; None when it holds nothing but comments.

    Args:
        text: The YAML (or JSON) text of one document.
        source: What to call it in errors: a file, or `command line`.
        key: The key the text is the value of, when it is not a whole file.
        with_lines: Whether line numbers mean something to the reader of an error.

    Raises:
        ConfigError: The text is not such YAML.
    """
    try:
        loader = _Loader(text)
        yaml_node = loader.get_single_node()
        if yaml_node is None:
            return None
        return _Reader(loader, source, with_lines=with_lines).read(yaml_node, tuple(key.split(".")) if key else ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark and with_lines else ""
        problem = ", ".join(str(part) for part in (error.context, error.problem) if part)
        hint = None if with_lines else "Put the value in quotes if it is meant as text."
        if mark and "${" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            hint = "Within { } and [ ], put ${...} in quotes."
        raise ConfigError(f"not valid YAML{where}: {problem}", source=source, key=key, hint=hint) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise ConfigError(
            f"not valid YAML at line {line}, column {column}: the character {chr(error.character)!r} is not allowed",
            source=source,
            key=key,
        ) from error
    except RecursionError as error:
        raise ConfigError(f"nested too deeply, more than {_MAX_DEPTH} levels", source=source, key=key) from error


def dump_yaml(values: Any) -> str:
    """Return plain values as YAML text from which this module, and OmegaConf, read the same values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def read_config_file(path: Path, *, may_be_empty: bool = False) -> Node:
    """Return the mapping in a configuration file.

    Raises:
        ConfigError: The file can't be read, or holds something else than one YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"the file can't be read: {error.strerror}", source=path) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file is not UTF-8 text: byte {error.start} is not valid", source=path) from error
    node = parse_yaml(text, str(path))
    if node is None or node.value is None:
        if may_be_empty:
            return Node({}, str(path))
        raise ConfigError("the file is empty; expected a mapping of server instances and values", source=path)
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"expected a mapping (`key: value`) at the top of the file, got {describe(node.plain())}", source=path
        )
    return node


def merge(base: Node, over: Node) -> Node:
    """Return `base` with `over` laid on it: mappings are merged key by key, everything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = merge(merged[key], child) if key in merged else child
    return Node(merged, base.origin)


def apply_override(root: Node, text: str, known_keys: Iterable[str] = ()) -> Node:
    """Return the configuration with one `key.sub=value` of the command line laid on it.

    A new key that looks like a slip for an existing one is refused, unless the override begins with `+`.

    Args:
        root: The configuration so far.
        text: The override; its value is read as YAML.
        known_keys: Keys that are never taken for a slip.

    Raises:
        ConfigError: The text is no override, or its key leads below a value that is no mapping.
    """
    match = _OVERRIDE.fullmatch(text)
    path = tuple(match["key"].split(".")) if match else ()
    if match is None or not all(path):
        raise ConfigError(
            f"expected an override `key.sub=value`, got {text!r}",
            source=COMMAND_LINE,
            hint="For example: counter.resources_servers.example_session_state_mgmt.num_workers=4",
        )
    value = parse_yaml(match["value"], COMMAND_LINE, key=match["key"], with_lines=False) or Node(None, COMMAND_LINE)
    return _put(root, path, value, 0, None if match["add"] else frozenset(known_keys))


def _put(node: Node, path: KeyPath, value: Node, depth: int, known_keys: frozenset[str] | None) -> Node:
    if depth == len(path):
        return merge(node, value)
    key = path[depth]
    if isinstance(node.value, list):
        items = list(node.value)
        child = node.child(key)
        if child is None:
            raise ConfigError(
                f"'{key}' is no position in the list; it has {len(items)} entries, counted from 0",
                source=COMMAND_LINE,
                key=".".join(path),
            )
        items[int(key)] = _put(child, path, value, depth + 1, known_keys)
        return Node(items, node.origin)
    if not isinstance(node.value, dict):
        if node.value is not None:
            raise ConfigError(
                f"nothing can be set below '{'.'.join(path[:depth])}': "
                f"it is a single value ({node.origin}), not a mapping",
                source=COMMAND_LINE,
                key=".".join(path),
            )
        node = Node({}, COMMAND_LINE)
    children: dict[str, Node] = dict(node.value) if isinstance(node.value, dict) else {}
    if key not in children and known_keys is not None and key not in known_keys:
        _refuse_slip(path, depth, children)
    children[key] = _put(children.get(key, Node(None, COMMAND_LINE)), path, value, depth + 1, known_keys)
    return Node(children, node.origin)


def _refuse_slip(path: KeyPath, depth: int, children: Iterable[str]) -> None:
    near = slip_for(path[depth], children)
    if near:
        parent = f"'{'.'.join(path[:depth])}'" if depth else "the configuration"
        raise ConfigError(
            f"there is no '{path[depth]}' in {parent}",
            source=COMMAND_LINE,
            key=".".join(path),
            hint=f"Did you mean '{near}'? To add a new key nevertheless, begin the override with '+'.",
        )
