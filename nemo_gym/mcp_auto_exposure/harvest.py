"""From routes to tools: what a resources server's application can offer over MCP, and what it can't and why."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, routing
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import Route

from nemo_gym.errors import ConfigError
from nemo_gym.tool_names import FRAMEWORK_ROUTES, is_tool_name

_COMPONENTS: Final = "#/components/schemas/"
_CATCH_ALL_PATH: Final = re.compile(r"/\{\w+\}")
_REFERENCE: Final = "$ref"


@dataclass(frozen=True, slots=True)
class MCPTool:
    """A tool as MCP clients see it, and the route that runs it.

    Attributes:
        name: Its name.
        description: What the model reads about it.
        input_schema: The JSON schema of its arguments, an object.
        path: The route that its arguments are posted to.
    """

    name: str
    description: str
    input_schema: Mapping[str, Any]
    path: str


@dataclass(frozen=True, slots=True)
class CatchAll:
    """One route for all tools, such as `POST /{name}`.

    Attributes:
        path: The route's path, with its parameter.
    """

    path: str

    def tool(self, name: str, description: str = "", input_schema: Mapping[str, Any] | None = None) -> MCPTool:
        """Return a tool that this route runs.

        Args:
            name: Its name, which takes the place of the path's parameter.
            description: What the model reads about it.
            input_schema: The JSON schema of its arguments; any object when None.
        """
        return MCPTool(
            name, description, input_schema or {"type": "object"}, _CATCH_ALL_PATH.sub(lambda _: f"/{name}", self.path)
        )


@dataclass(frozen=True, slots=True)
class Harvest:
    """What an application's routes give.

    Attributes:
        tools: The tools.
        catchall: The route for all tools, if there is one.
        refused: Per route that can't be a tool, why.
    """

    tools: list[MCPTool]
    catchall: CatchAll | None
    refused: dict[str, str]


def harvest_tools(app: FastAPI) -> Harvest:
    """Read the tools from an application's plain `POST /<tool>` routes.

    Name, description (the handler's docstring) and argument schema are those of the application's OpenAPI
    description; a route that is hidden from it (`include_in_schema=False`) is no tool.
    """
    tools: list[MCPTool] = []
    refused: dict[str, str] = {}
    catchall = None
    seen: set[str] = set()
    for route in all_routes(app):
        path = str(getattr(route, "path_format", None) or getattr(route, "path", ""))
        if path in seen or path.strip("/").split("/")[0] in FRAMEWORK_ROUTES or not _is_shown_post(route):
            continue
        seen.add(path)
        if isinstance(getattr(route, "original_route", route), Route) and not _is_api_route(route):
            refused[path] = "a plain Starlette route does not say what arguments it takes"
        elif _CATCH_ALL_PATH.fullmatch(path):
            catchall = catchall or CatchAll(path)
        elif isinstance(found := _tool_of(route, path), MCPTool):
            tools.append(found)
        else:
            refused[path] = found
    return Harvest(tools, catchall, refused)


def all_routes(app: FastAPI) -> Iterable[Any]:
    """Return an application's routes, those of included routers too."""
    # Newer versions of FastAPI keep an included router as one route.
    flattened = getattr(routing, "iter_route_contexts", iter)
    routes: Iterable[Any] = flattened(app.routes)
    return routes


def checked_tools(tools: Any, server_name: str) -> list[MCPTool]:
    """Return the tools that a server's `mcp_tools` gave.

    Raises:
        ConfigError: If they are no list of `MCPTool`, or one has no usable name, schema or path, or another's name.
    """
    if not isinstance(tools, Iterable):
        if inspect.iscoroutine(tools):
            tools.close()
        raise ConfigError(f"mcp_tools returned {type(tools).__name__}; expected a list of MCPTool", key=server_name)
    checked: dict[str, MCPTool] = {}
    for tool in tools:
        problem = _problem_of(tool)
        if not problem and tool.name in checked:
            problem = f"two tools named {tool.name!r}"
        if problem:
            raise ConfigError(f"mcp_tools returned {problem}", key=server_name)
        checked[tool.name] = tool
    return list(checked.values())


def _problem_of(tool: Any) -> str:
    """Return what is wrong with a tool; empty when nothing is."""
    if not isinstance(tool, MCPTool):
        return f"{tool!r}, which is no MCPTool"
    if not isinstance(tool.name, str) or not is_tool_name(tool.name):
        return f"a tool named {tool.name!r}; names have letters, digits, '_' and '-' only, and are no framework route"
    if not isinstance(tool.description, str):
        return f"{tool.name!r} with the description {tool.description!r}; expected a text"
    if not isinstance(tool.input_schema, Mapping) or tool.input_schema.get("type") != "object":
        return f"{tool.name!r} with an input_schema that is not of type 'object'"
    if not isinstance(tool.path, str) or not tool.path.startswith("/"):
        return f"{tool.name!r} with the path {tool.path!r}; expected a route, such as '/{tool.name}'"
    if tool.path.strip("/").split("/")[0] in FRAMEWORK_ROUTES:
        return f"{tool.name!r} with the path {tool.path!r}, which is a route of the framework and no tool"
    try:
        json.dumps(dict(tool.input_schema))
    except (TypeError, ValueError) as error:
        return f"{tool.name!r} with an input_schema that is no JSON: {error}"
    return ""


def _is_api_route(route: Any) -> bool:
    return isinstance(getattr(route, "original_route", route), APIRoute)


def _is_shown_post(route: Any) -> bool:
    methods = getattr(route, "methods", None)
    takes_post = "POST" in methods if methods else isinstance(route, Route)
    return takes_post and bool(getattr(route, "include_in_schema", False))


def _tool_of(route: Any, path: str) -> MCPTool | str:
    """Return the tool that a route is, or why it can be none."""
    if not is_tool_name(path.removeprefix("/")):
        return "a tool's path is one plain segment"
    try:
        description = _openapi_of(route)
    except Exception as error:  # noqa: BLE001 - whatever pydantic can't describe: the route's fault, and told
        return f"its arguments have no JSON schema: {_first_line(error)}"
    operation = description["paths"][path]["post"]
    problem, schema = _arguments_of(operation, description.get("components", {}).get("schemas", {}))
    return problem or MCPTool(path.removeprefix("/"), operation.get("description", ""), schema, path)


def _openapi_of(route: Any) -> dict[str, Any]:
    try:
        return get_openapi(title="", version="", routes=[route])
    except Exception:  # noqa: BLE001 - it may be the reply that has no schema, and a tool needs none
        bare = APIRoute(
            route.path,
            route.endpoint,
            methods=["POST"],
            response_model=None,
            description=route.description,
            dependencies=route.dependencies,
        )
        return get_openapi(title="", version="", routes=[bare])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _arguments_of(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return why an operation can't be a tool (else an empty text), and the schema of its arguments."""
    required = [f"{it['in']} parameter '{it['name']}'" for it in operation.get("parameters", ()) if it.get("required")]
    if required:
        return f"it needs the {' and the '.join(required)}, and a tool's arguments come in a JSON body", {}
    if "requestBody" not in operation:
        return "", {"type": "object"}
    content = operation["requestBody"]["content"]
    if "application/json" not in content:
        kinds = ", ".join(content)
        return f"its body is {kinds} (a file or a form), and a tool's arguments come in a JSON body", {}
    schema = _self_contained(_without_null(content["application/json"].get("schema", {})), schemas)
    if not _is_object(schema, schema.get("$defs", {})):
        return f"its body is of type {schema.get('type', 'unknown')!r}, and a tool's arguments are a JSON object", {}
    return "", {**schema, "type": "object"}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an optional body as that of the body; a tool's arguments are always there."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    return {**kinds[0], **{key: it for key, it in schema.items() if key not in ("anyOf", "title", "default")}}


def _is_object(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> bool:
    """Return whether values of a schema can be JSON objects, as far as it says."""
    if _REFERENCE in schema:
        return _is_object(definitions[schema[_REFERENCE].rpartition("/")[2]], definitions)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return any(_is_object(it, definitions) for it in schema[key])
    return bool(schema.get("type", "object") == "object")


def _self_contained(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema with what it refers to under its own `$defs`, and with its outermost reference resolved."""
    definitions: dict[str, Any] = {}

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(it) for it in value]
        if not isinstance(value, Mapping):
            return value
        target = value.get(_REFERENCE)
        if isinstance(target, str) and target.startswith(_COMPONENTS):
            name = target.removeprefix(_COMPONENTS)
            if name not in definitions:
                definitions[name] = None  # a schema may refer to itself
                definitions[name] = moved(schemas[name])
            return {**value, _REFERENCE: f"#/$defs/{name}"}
        # A discriminator's mapping holds references as plain texts.
        return {
            key: f"#/$defs/{it.removeprefix(_COMPONENTS)}"
            if isinstance(it, str) and it.startswith(_COMPONENTS)
            else moved(it)
            for key, it in value.items()
        }

    result: dict[str, Any] = moved(schema)
    if set(result) == {_REFERENCE}:
        name = result[_REFERENCE].rpartition("/")[2]
        result = dict(definitions[name])
        if f"#/$defs/{name}" not in repr([result, {key: it for key, it in definitions.items() if key != name}]):
            del definitions[name]
    return {**result, "$defs": definitions} if definitions else result
