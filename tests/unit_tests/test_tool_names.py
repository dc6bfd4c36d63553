"""Names of tools: what can be one, and what MCP clients make of it."""

from __future__ import annotations

import pytest

from nemo_gym.base_resources_server import is_tool_name as from_the_base
from nemo_gym.mcp_auto_exposure import normalize_tool_name as from_the_package
from nemo_gym.tool_names import FRAMEWORK_ROUTES, is_tool_name, mcp_tool_name, normalize_tool_name


@pytest.mark.parametrize("name", ["a", "get_counter", "Get-Counter-2", "mcp__counter__get", "x" * 128])
def test_a_plain_path_segment_is_a_tool_name(name: str) -> None:
    assert is_tool_name(name)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "ä", "a\n", "x" * 129, "{name}", *sorted(FRAMEWORK_ROUTES)])
def test_anything_else_and_the_frameworks_own_routes_are_none(name: str) -> None:
    assert not is_tool_name(name)


def test_the_names_are_the_same_where_environments_import_them() -> None:
    assert from_the_base is is_tool_name
    assert from_the_package is normalize_tool_name


@pytest.mark.parametrize(
    ("recorded", "bare"),
    [
        ("mcp__counter__increment", "increment"),
        ("mcp__counter__get__value", "get__value"),
        ("mcp__my_server__get", "get"),
        ("mcp__counter___private", "_private"),
        ("increment", "increment"),
        ("mcp__increment", "mcp__increment"),
        ("mcp__counter__", "mcp__counter__"),
        ("mcp____get", "mcp____get"),
        ("xmcp__counter__get", "xmcp__counter__get"),
        ("MCP__counter__get", "MCP__counter__get"),
        ("", ""),
    ],
)
def test_a_recorded_name_becomes_the_tools_own(recorded: str, bare: str) -> None:
    assert normalize_tool_name(recorded) == bare


@pytest.mark.parametrize(
    ("recorded", "server", "bare"),
    [
        ("mcp__counter__increment", "counter", "increment"),
        ("mcp__other__increment", "counter", "mcp__other__increment"),
        ("mcp__counter__increment", "count", "mcp__counter__increment"),
        ("mcp__a__b__increment", "a__b", "increment"),
        ("mcp__a__b__increment", "a", "b__increment"),
        ("mcp__my_counter_v2__get", "my counter.v2", "get"),
        ("mcp__my counter.v2__get", "my counter.v2", "get"),
        ("mcp__counter__", "counter", "mcp__counter__"),
        ("increment", "counter", "increment"),
    ],
)
def test_with_a_server_only_its_own_prefix_is_taken_off(recorded: str, server: str, bare: str) -> None:
    assert normalize_tool_name(recorded, server) == bare


@pytest.mark.parametrize("server", ["counter", "my counter.v2", "a__b", "zähler"])
@pytest.mark.parametrize("tool", ["get", "get__value", "_x", "mcp__a__b"])
def test_what_clients_call_a_tool_is_normalised_back(server: str, tool: str) -> None:
    assert normalize_tool_name(mcp_tool_name(server, tool), server) == tool
