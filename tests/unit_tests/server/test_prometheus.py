"""What `/metrics` says, read back by the parser of Prometheus's own client; and the dashboard that asks for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.global_config import load_global_config
from nemo_gym.server.figures import Histogram, ServerFigures, WorkerFigures
from nemo_gym.server.head import HeadServer
from nemo_gym.server.prometheus import metrics_text

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana" / "nemo_gym.json"
STATUS_PAGE = DOCS / "status.md"
METRIC_NAME = re.compile(r"\bnemo_gym_\w+")
NAME = 'coun"t\\er\n'
HISTOGRAM = Histogram((0.01, 0.1, 1.0), (1, 2, 3, 4), 12.5)


def worker(slot: int, **values: Any) -> WorkerFigures:
    return WorkerFigures(**{"worker_id": f"{slot:032x}", "slot": slot, "pid": 1000 + slot, "started_at": 5.0, **values})


def read(*workers: WorkerFigures, **values: Any) -> dict[str, Metric]:
    figures = ServerFigures('coun"t\\er\n', "resources_servers", 10.0, len(workers), workers, "", **values)
    content, content_type = metrics_text(figures)
    assert content_type.startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(content.decode())}


def values_of(family: Metric, label: str = "worker") -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in family.samples}


def test_every_worker_has_its_series_under_the_name_of_its_slot() -> None:
    found = read(
        worker(0, sessions_open=3, memory_bytes=10**9, cpu_s=1.5),
        worker(1, sessions_open=4, restarts=2, sessions_lost=7, loop_lag_s=0.25),
    )
    assert values_of(found["nemo_gym_sessions_open"]) == {"0": 3, "1": 4}
    assert values_of(found["nemo_gym_worker_restarts"]) == {"0": 0, "1": 2}
    assert values_of(found["nemo_gym_sessions_lost"]) == {"0": 0, "1": 7}
    assert values_of(found["nemo_gym_event_loop_lag_seconds"]) == {"0": 0, "1": 0.25}
    assert values_of(found["nemo_gym_worker_resident_memory_bytes"]) == {"0": 10**9, "1": 0}
    assert values_of(found["nemo_gym_worker_cpu_seconds"]) == {"0": 1.5, "1": 0}
    assert values_of(found["nemo_gym_worker_start_time_seconds"]) == {"0": 5, "1": 5}
    assert values_of(found["nemo_gym_workers"], "server") == {'coun"t\\er\n': 2}
    assert found["nemo_gym_worker_restarts"].type == "counter"
    assert found["nemo_gym_sessions_open"].type == "gauge"


def test_series_have_help_and_names_as_prometheus_wants_them() -> None:
    for name, family in read(worker(0)).items():
        assert family.documentation.endswith("."), name
        assert family.type in ("counter", "gauge", "histogram"), name
        units = ("seconds", "bytes", "info", "up", "workers", "open", "in_flight")
        assert family.type == "counter" or name.endswith(units), name


def test_replies_are_counted_by_class_and_reason_from_zero_on() -> None:
    found = read(worker(0, replies={"2xx": 8, "none": 1}, lost_replies={"worker_gone": 2}))
    assert values_of(found["nemo_gym_requests"], "code") == {"2xx": 8, "4xx": 0, "5xx": 0, "none": 1}
    lost = values_of(found["nemo_gym_lost_session_replies"], "reason")
    assert lost == {"worker_gone": 2, "session_expired": 0, "session_ended": 0}


def test_histograms_are_cumulative_and_end_with_all() -> None:
    family = read(worker(0, request_seconds=HISTOGRAM))["nemo_gym_request_duration_seconds"]
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    assert buckets == {"0.01": 1, "0.1": 3, "1.0": 6, "+Inf": 10}
    others = {sample.name: sample.value for sample in family.samples if not sample.name.endswith("_bucket")}
    assert others == {
        "nemo_gym_request_duration_seconds_count": 10,
        "nemo_gym_request_duration_seconds_sum": 12.5,
    }


def test_a_silent_worker_has_no_series_that_look_like_a_restart() -> None:
    found = read(worker(0), worker(1, responding=False, restarts=3, sessions_lost=5))
    assert values_of(found["nemo_gym_worker_up"]) == {"0": 1, "1": 0}
    assert values_of(found["nemo_gym_worker_restarts"]) == {"0": 0, "1": 3}
    assert values_of(found["nemo_gym_sessions_lost"]) == {"0": 0, "1": 5}
    for name in ("nemo_gym_sessions_open", "nemo_gym_requests", "nemo_gym_hop_duration_seconds"):
        assert {sample.labels["worker"] for sample in found[name].samples} == {"0"}


def test_an_empty_place_keeps_what_is_known_of_it() -> None:
    found = read(worker(0), worker(1, pid=0, started_at=0.0, responding=False, state="ended", restarts=3))
    assert values_of(found["nemo_gym_worker_up"]) == {"0": 1, "1": 0}
    assert values_of(found["nemo_gym_worker_restarts"]) == {"0": 0, "1": 3}
    assert values_of(found["nemo_gym_worker_start_time_seconds"]) == {"0": 5}


def test_two_processes_in_one_place_are_told_apart() -> None:
    leaving = worker(1, pid=7, state="leaving", sessions_open=9)
    found = read(worker(0), leaving, worker(1), worker(2, state="starting", responding=False))
    assert values_of(found["nemo_gym_sessions_open"]) == {"0": 0, "1": 0, "1.1": 9}
    assert values_of(found["nemo_gym_worker_up"]) == {"0": 1, "1": 1, "1.1": 1, "2": 0}


def test_no_series_stands_twice() -> None:
    rows = [worker(slot, pid=pid) for pid, slot in enumerate((0, 0, 0, 1, 1))]
    for family in read(*rows, lost_with_removed=2).values():
        assert max(Counter((one.name, *sorted(one.labels.items())) for one in family.samples).values()) == 1


def queries(node: Any) -> Iterator[str]:
    """Every query of a Grafana dashboard: of its panels, variables and annotations."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key in ("expr", "query") and isinstance(value, str))
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from queries(value)


def test_the_grafana_dashboard_asks_for_metrics_that_are_served() -> None:
    families = read(worker(0, request_seconds=HISTOGRAM, hop_seconds=HISTOGRAM)).values()
    served = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = {name for query in queries(dashboard) for name in METRIC_NAME.findall(query)}
    assert asked <= served
    unseen = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name in served - asked}
    assert unseen <= {name.removesuffix("_bucket") for name in asked}, "a metric without a panel"


def test_the_page_on_status_lists_every_metric_with_its_type() -> None:
    page = STATUS_PAGE.read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(nemo_gym_\w+)` \| (\w+)", page, re.MULTILINE))
    served = {name + "_total" * (family.type == "counter"): family.type for name, family in read(worker(0)).items()}
    assert listed == served


def test_the_grafana_dashboard_can_be_imported_anywhere() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "server"}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    for panel in panels:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}, panel["title"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    boxes = [tuple(panel["gridPos"][side] for side in "xywh") for panel in dashboard["panels"]]
    cells = [(x + i, y + j) for x, y, w, h in boxes for i in range(w) for j in range(h)]
    assert len(cells) == len(set(cells)), "panels lie on one another"
    assert max(x for x, _ in cells) < 24


async def test_the_head_server_tells_prometheus_where_to_look(tmp_path: Path) -> None:
    config_path = tmp_path / "two.yaml"
    config_path.write_text(
        "one: {resources_servers: {example_session_state_mgmt: {entrypoint: app.py, port: 8101}}}\n"
        "two: {resources_servers: {example_session_state_mgmt: {entrypoint: app.py, port: 8102, host: '::1'}}}\n"
    )
    head = HeadServer(BaseServerConfig(host="127.0.0.1", port=11000), load_global_config([config_path]))
    transport = httpx2.ASGITransport(head.setup_webserver())
    async with httpx2.AsyncClient(transport=transport, base_url="http://head") as http:
        reply = await http.get("/prometheus_targets")
    assert reply.headers["content-type"] == "application/json"
    assert reply.json() == [{"targets": ["127.0.0.1:8101", "[::1]:8102"], "labels": {}}]
