"""Each promise about sessions has a test that keeps it, and each marker names a promise.

The tests' sources are read, not run: those that need several processes count too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
MANIFEST = TESTS / "session_promises.txt"
COMPONENT_FOLDERS = ("resources_servers", "responses_api_agents", "responses_api_models")


def promised() -> list[str]:
    lines = [line for line in MANIFEST.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*: [A-Z].{20,}\.", line), f"not `id: Promise.`: {line}"
        assert len(line) <= 130, line
    return [line.partition(":")[0] for line in lines]


def modules_of_tests() -> Iterator[Path]:
    yield from TESTS.rglob("test_*.py")
    for folder in COMPONENT_FOLDERS:
        yield from (TESTS.parent / folder).glob("*/tests/test_*.py")


def markers_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each marker's promise and its place."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        place = f"{path.name}:{node.lineno}"
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise":
                assert node.name.startswith(("test_", "Test")), f"{place}: {node.name} is no test"
                assert decorator.args, f"{place}: a marker of no promise"
                for argument in decorator.args:
                    assert isinstance(argument, ast.Constant), f"{place}: a promise is named by its id"
                    yield str(argument.value), place


def kept() -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for path in modules_of_tests():
        for promise, place in markers_in(path):
            places.setdefault(promise, []).append(place)
    return places


def test_a_promise_is_made_once() -> None:
    assert [promise for promise, times in Counter(promised()).items() if times > 1] == []


def test_every_promise_is_kept_by_a_test() -> None:
    assert sorted(set(promised()) - set(kept())) == []


def test_every_marker_names_a_promise() -> None:
    assert {promise: places for promise, places in kept().items() if promise not in promised()} == {}


def test_markers_are_read_from_functions_classes_and_methods(tmp_path: Path) -> None:
    module = tmp_path / "test_example.py"
    mark = "@pytest.mark.promise"
    module.write_text(
        f"{mark}('a', 'b')\nasync def test_one(): ...\n"
        f"{mark}('c')\nclass TestTwo:\n    {mark}('d')\n    def test_three(self): ...\n"
    )
    assert sorted(promise for promise, _ in markers_in(module)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("marked", ["('a')\ndef helper(): ...", "()\ndef test_it(): ...", "(name)\ndef test_it(): ..."])
def test_a_marker_that_proves_nothing_is_refused(tmp_path: Path, marked: str) -> None:
    module = tmp_path / "test_example.py"
    module.write_text(f"@pytest.mark.promise{marked}\n")
    with pytest.raises(AssertionError):
        list(markers_in(module))
