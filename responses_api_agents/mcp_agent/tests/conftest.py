"""One stage for many tests: to start and stop servers takes longer than a rollout."""

from collections.abc import Iterator

import pytest

from responses_api_agents.mcp_agent.tests.stage import House, ScriptedModel, Watched, exposed, no_change, room, serving


@pytest.fixture(scope="module")
def running_house() -> Iterator[House]:
    environment, model = Watched(exposed(room())), ScriptedModel()
    with serving(environment) as environment_port, serving(model.app) as model_port:
        yield House(environment, model, (environment_port, model_port))


@pytest.fixture
def house(running_house: House) -> House:
    running_house.environment.change = no_change
    running_house.model.turns, running_house.model.seen = [], []
    return running_house
