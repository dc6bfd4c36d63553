"""The typed pieces of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from nemo_gym.config_types import (
    AgentServerRef,
    AggregateMetrics,
    AggregateMetricsRequest,
    BaseRunServerInstanceConfig,
    BaseServerConfig,
    DatasetConfig,
    Domain,
    ModelServerRef,
    ResourcesServerRef,
    ServerInstance,
    ServerRef,
    server_url,
)


def instance(**changes: Any) -> ServerInstance:
    values: dict[str, Any] = {
        "name": "counter",
        "kind": "resources_servers",
        "implementation": "counter_env",
        "entrypoint": "app.py",
        "host": "127.0.0.1",
        "port": 8000,
        "num_workers": 1,
        "folder": Path("/env"),
        "settings": {},
    }
    return ServerInstance(**{**values, **changes})


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("node7.example.com", "http://node7.example.com:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fe80::1", "http://[fe80::1]:8000"),
    ],
)
def test_a_server_is_called_at_an_address_that_can_be_dialled(host: str, url: str) -> None:
    assert instance(host=host).url == url
    assert server_url(host, 8000) == url


def test_a_server_instance_can_not_be_changed() -> None:
    with pytest.raises(AttributeError):
        instance().port = 1  # type: ignore[misc]


def test_keys_of_an_environments_own_are_kept() -> None:
    config = BaseRunServerInstanceConfig(
        host="127.0.0.1", port=1, entrypoint="app.py", name="counter", difficulty={"level": 3}
    )

    assert config.model_extra == {"difficulty": {"level": 3}}
    assert (config.num_workers, config.domain, config.verified, config.datasets) == (None, None, False, None)


def test_a_subclass_declares_references_and_defaults() -> None:
    class AgentConfig(BaseRunServerInstanceConfig):
        resources_server: ResourcesServerRef
        model_server: ModelServerRef
        max_steps: int = 5

    config = AgentConfig.model_validate(
        {
            "host": "127.0.0.1",
            "port": 1,
            "entrypoint": "app.py",
            "name": "agent",
            "domain": "math",
            "resources_server": {"type": "resources_servers", "name": "counter"},
            "model_server": {"type": "responses_api_models", "name": "policy_model"},
            "datasets": [{"name": "example", "type": "example", "jsonl_fpath": "data/example.jsonl", "license": "MIT"}],
        }
    )

    assert config.model_server.name == "policy_model"
    assert config.max_steps == 5
    assert config.domain is Domain.MATH
    assert config.datasets is not None
    assert config.datasets[0].num_repeats == 1
    assert config.datasets[0].model_extra == {"license": "MIT"}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("resources_servers", ResourcesServerRef),
        ("responses_api_agents", AgentServerRef),
        ("responses_api_models", ModelServerRef),
    ],
)
def test_the_type_of_a_reference_decides_its_class(kind: str, expected: type[BaseModel]) -> None:
    reference = TypeAdapter(ServerRef).validate_python({"type": kind, "name": "x"})

    assert type(reference) is expected
    assert reference.name == "x"


def test_a_reference_to_the_wrong_kind_is_refused() -> None:
    with pytest.raises(ValidationError, match="responses_api_models"):
        ModelServerRef.model_validate({"type": "resources_servers", "name": "counter"})


@pytest.mark.parametrize("change", [{"type": "test"}, {"num_repeats": 0}, {"jsonl_fpath": None}])
def test_a_dataset_that_can_not_be_used_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(change))):
        DatasetConfig.model_validate({"name": "a", "type": "train", "jsonl_fpath": "a.jsonl", **change})


def test_a_server_config_needs_host_and_port_only() -> None:
    config = BaseServerConfig(host="0.0.0.0", port=80)

    assert config.model_dump() == {"host": "0.0.0.0", "port": 80, "num_workers": None}


def test_metrics_travel_with_fields_of_an_environments_own() -> None:
    request = AggregateMetricsRequest(verify_responses=[{"reward": 1.0}])
    metrics = AggregateMetrics.model_validate(
        {"group_level_metrics": [{"task": 0}], "agent_metrics": {"mean/reward": 1.0}, "key_metrics": {}, "notes": "ok"}
    )

    assert request.verify_responses == [{"reward": 1.0}]
    assert AggregateMetrics.model_validate_json(metrics.model_dump_json()) == metrics
    assert metrics.model_extra == {"notes": "ok"}
    assert AggregateMetrics() == AggregateMetrics(group_level_metrics=[], agent_metrics={}, key_metrics={})
