"""The house keeps its walls: floors, sizes, and habits that a command can see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "nemo_gym"
ROOT = PACKAGE.parent

# The longest matching prefix gives a module's floor; a module imports from lower floors, or from its own part.
FLOORS = {
    "errors": 0,
    "lazy_module": 0,
    "paths": 0,
    "tool_names": 0,
    "config_types": 1,
    "logs": 1,
    "wire": 1,
    "openai_utils": 1,
    "configuration": 2,
    "global_config": 2,
    "responses_converter": 2,
    "metrics": 2,
    "session_routing": 2,
    "server": 3,
    "server_utils": 3,
    "mcp_auto_exposure": 4,
    "sandbox": 4,
    "base_resources_server": 4,
    "base_gymnasium_server": 4,
    "base_responses_api_agent": 4,
    "base_responses_api_model": 4,
    "backend_model": 4,
    "deployment": 5,
    "rollouts": 5,
    "conformance": 5,
    "dashboard": 5,
    "rollout_collection": 5,
    "reports": 5,
    "reward_profile": 5,
    "cli": 6,
}
# Doors are one module of names for the part beside them; configuration is one job in several files.
SAME_FLOOR = {
    "base_resources_server": {"mcp_auto_exposure"},
    "base_gymnasium_server": {"base_resources_server"},
    "openai_utils": {"wire"},
    "server_utils": {"server"},
    "global_config": {"configuration"},
    "backend_model": {"base_responses_api_model"},
    "rollout_collection": {"rollouts"},
    "reward_profile": {"rollouts"},
    "conformance": {"deployment", "rollouts"},
    "dashboard": {"deployment", "rollouts"},
    "reports": {"reward_profile", "rollouts"},
    "base_responses_api_agent": {"base_resources_server"},
}
OPTIONAL_EXTRAS = {"gymnasium", "reasoning_gym"}
NEEDS_AN_EXTRA = {"nemo_gym.mcp_auto_exposure.endpoint", "nemo_gym.reports.report"}
COMPONENT_FOLDERS = ("resources_servers", "responses_api_agents", "responses_api_models")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def library_modules() -> list[Path]:
    return [path for path in modules() if "scaffold" not in path.relative_to(PACKAGE).parts]


def component_modules() -> list[Path]:
    return sorted(
        path for kind in COMPONENT_FOLDERS for path in (ROOT / kind).rglob("*.py") if "tests" not in path.parts
    )


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The room of the house: the first name below the package."""
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def imports_of(tree: ast.AST, module: str, path: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            for alias in node.names:
                candidate = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
                is_module = candidate.with_suffix(".py").exists() or (candidate / "__init__.py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def own_imports(path: Path) -> set[str]:
    module = name_of(path)
    return {name for name in imports_of(parse(path), module, path) if name.split(".")[0] == "nemo_gym"} - {module}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_import_from_lower_floors_only(path: Path) -> None:
    part = part_of(name_of(path))
    if not part:
        return
    assert part in FLOORS, f"{part}: give the new module a floor"
    for imported in own_imports(path):
        other = part_of(imported)
        if other in ("", part) or other in SAME_FLOOR.get(part, ()):
            continue
        assert FLOORS[other] < FLOORS[part], f"{part} (floor {FLOORS[part]}) imports {other} (floor {FLOORS[other]})"


def test_no_import_cycles() -> None:
    graph = {name_of(path): own_imports(path) for path in modules()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in done:
            return
        for imported in sorted(graph.get(module, ())):
            visit(imported, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_every_floor_names_a_module_that_exists() -> None:
    existing = {part_of(name_of(path)) for path in modules()}
    assert set(FLOORS) <= existing


@pytest.mark.parametrize(
    "path", [*library_modules(), *component_modules()], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_imports_inside_functions_but_of_optional_extras(path: Path) -> None:
    for function in ast.walk(parse(path)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in imports_of(function, name_of(path) if PACKAGE in path.parents else path.stem, path):
                optional = name.split(".")[0] in OPTIONAL_EXTRAS or name in NEEDS_AN_EXTRA
                assert optional, f"{path}:{function.lineno} imports {name}"


@pytest.mark.parametrize(
    "path", [*library_modules(), *component_modules()], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_and_functions_stay_readable(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", library_modules(), ids=name_of)
def test_no_print_no_global_no_base_http_middleware(path: Path) -> None:
    for node in ast.walk(parse(path)):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"line {node.lineno}: print"
        if isinstance(node, ast.Name):
            assert node.id != "BaseHTTPMiddleware", f"line {node.lineno}: BaseHTTPMiddleware"


@pytest.mark.parametrize("path", library_modules(), ids=name_of)
def test_every_module_says_why_it_is_there(path: Path) -> None:
    docstring = ast.get_docstring(parse(path))
    assert docstring
    assert len(docstring) > 20


def test_the_worker_variables_are_spelled_in_one_module() -> None:
    spelled = {name_of(path) for path in modules() if "NEMO_GYM_WORKER_" in path.read_text()}
    assert spelled == {"nemo_gym.server.worker_env"}


def test_session_routing_knows_nothing_of_gyms_servers() -> None:
    for path in (PACKAGE / "session_routing").glob("*.py"):
        assert {part_of(name) for name in own_imports(path)} <= {"session_routing", "errors", "lazy_module", "paths"}
