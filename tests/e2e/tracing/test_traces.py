"""One rollout is one trace, through collector, agent, model, resources server and the hop."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from nemo_gym.global_config import find_open_port
from nemo_gym.paths import PARENT_DIR
from nemo_gym.server.tracing import start_tracing
from tests.e2e.tracing.collecting import Span, collecting

HERE = Path(__file__).parent
ROWS = PARENT_DIR / "resources_servers" / "example_session_state_mgmt" / "data" / "example.jsonl"
ROLLOUTS = 6


def collect(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run some of the counter's rows, and one that fails, with the agent that hops."""
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()[:ROLLOUTS]]
    rows.append({**rows[0], "fails": True})
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [sys.executable, "-m", "nemo_gym.cli", "eval", "run", "--config", str(HERE / "servers.yaml")]
    command += ["--agent", "agent", "--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    environment = {**os.environ, "NEMO_GYM_EXTRA_ROOTS": str(HERE / "components")}
    return subprocess.run(
        [*command, *overrides], cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
    )


def parent_of(span: Span, spans: dict[str, Span]) -> str | None:
    """Return the service and the name of a span's parent."""
    parent = spans.get(span.parent)
    return f"{parent.service}: {parent.name}" if parent is not None else None


def test_a_rollout_is_one_trace_of_all_its_processes_and_the_hop_and_a_failure_is_marked(tmp_path: Path) -> None:
    with collecting() as collector:
        result = collect(tmp_path, f"tracing.endpoint={collector.url}")
    assert result.returncode == 1, result.stderr
    results = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in results] == [1.0] * ROLLOUTS

    assert len({span.id for span in collector.spans}) == len(collector.spans)
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in collector.spans:
        traces[span.trace].append(span)
    # A trace by its rollout; the servers' own questions have others.
    rollouts = {
        span.attributes["nemo_gym.rollout"]: traces[span.trace] for span in collector.spans if span.name == "rollout"
    }
    assert sorted(rollouts) == [f"{row}-0" for row in range(ROLLOUTS + 1)]
    assert len({spans[0].trace for spans in rollouts.values()}) == len(rollouts)
    check_failure(rollouts.pop(f"{ROLLOUTS}-0"))
    for spans in rollouts.values():
        check_trace(spans)
    assert not [body for body in collector.bodies if b"what no trace tells" in body or b"Traceback" in body]


def check_failure(spans: list[Span]) -> None:
    failed = {f"{span.service}: {span.name}" for span in spans if span.is_error}
    assert failed == {"collector: rollout", "collector: attempt", "collector: POST agent"}
    (rollout,) = (span for span in spans if span.name == "rollout")
    assert rollout.attributes["nemo_gym.failure"] == "http_error"
    (answer,) = (span for span in spans if span.service == "agent")
    assert answer.attributes["http.response.status_code"] == 422


def check_trace(spans: list[Span]) -> None:
    by_id = {span.id: span for span in spans}
    assert {span.service for span in spans} == {"collector", "agent", "policy_model", "counter"}
    assert [span.name for span in spans if not span.parent] == ["rollout"]
    assert not [span for span in spans if span.is_error]
    assert all(span.parent in by_id for span in spans if span.parent)
    found = Counter((f"{span.service}: {span.name}", parent_of(span, by_id)) for span in spans)
    for edge in (
        ("collector: attempt", "collector: rollout"),
        ("collector: POST agent", "collector: attempt"),
        ("agent: POST /run", "collector: POST agent"),
    ):
        assert found[edge] == 1, edge
    # Straight to the session's worker, or on a busy machine by another one.
    for name in ("counter: POST /seed_session", "counter: POST /verify"):
        assert found[name, "agent: POST counter"] + found[name, "counter: hop"] == 1, name
    assert found["agent: POST policy_model", "agent: POST /run"] >= 2
    assert found["policy_model: POST /v1/responses", "agent: POST policy_model"] >= 2
    assert found["counter: POST /get_counter_value", "counter: hop"] >= 1
    for hop in (span for span in spans if span.name == "hop"):
        assert parent_of(hop, by_id) == "counter: POST"
        (owner,) = (span for span in spans if span.parent == hop.id)
        assert hop.attributes["nemo_gym.owner"] == owner.attributes["nemo_gym.worker"]
        assert hop.attributes["nemo_gym.worker"] != hop.attributes["nemo_gym.owner"]
    (rollout,) = {span.attributes["nemo_gym.rollout"] for span in spans if "nemo_gym.rollout" in span.attributes}
    assert rollout.endswith("-0")


def record_and_stop(endpoint: str) -> None:
    tracing = start_tracing({"tracing": {"endpoint": endpoint, "sample": 1.0}}, "counter")
    assert tracing is not None
    with tracing.rollout("0-0", "agent"), tracing.call("counter", "POST", "/verify") as call:
        assert call.headers.keys() == tracing.headers().keys() == {"traceparent"}
    tracing.stop()


def test_a_collector_that_is_away_holds_up_nothing() -> None:
    record_and_stop(f"http://127.0.0.1:{find_open_port()}")


def test_a_collector_that_answers_nothing_holds_up_an_end_for_a_moment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_gym.server.otel._STOP_S", 0.1)
    # It takes connections, and no more; the end would wait for good.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        record_and_stop(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_without_the_setting_nothing_of_it_is_imported() -> None:
    program = (
        "import sys, nemo_gym.server.bootstrap, nemo_gym.cli.eval\n"
        "from nemo_gym.server.tracing import start_tracing\n"
        "assert start_tracing({}, 'counter') is None\n"
        "assert start_tracing({'tracing': {'enabled': False}}, 'counter') is None\n"
        # FastAPI imports the interfaces by itself, where they are installed.
        "sys.exit([name for name in sys.modules if name.startswith('opentelemetry.sdk')] or 0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
