"""One question, one tool: ask for the weather in a city.

The verdict depends on the trajectory alone, so this server keeps no state. The weather is made up from the city's
name: the same city always has the same, without a network.
"""

import hashlib
import json
import unicodedata

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseFunctionToolCall
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")


class GetWeatherRequest(BaseModel):
    """The arguments of the tool `get_weather`."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(min_length=1)


class GetWeatherResponse(BaseModel):
    """The result of the tool `get_weather`."""

    city: str
    conditions: str
    temperature_celsius: int


class SingleToolCallVerifyRequest(BaseVerifyRequest):
    """A finished rollout; other fields of the row are handed through."""

    model_config = ConfigDict(extra="allow")

    expected_city: str


class SingleToolCallVerifyResponse(SingleToolCallVerifyRequest, BaseVerifyResponse):
    """The verdict, with the cities that were asked for."""

    called_cities: list[str]


class SingleToolCallResourcesServer(SimpleResourcesServer):
    """Serves `get_weather` and checks that it was called for the right city."""

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        """Return the application with the tool."""
        app = super().setup_webserver()
        app.post("/get_weather")(self.get_weather)
        return app

    async def get_weather(self, body: GetWeatherRequest) -> GetWeatherResponse:
        """Tell the current weather in a city."""
        digest = hashlib.sha256(comparable(body.city).encode()).digest()
        return GetWeatherResponse(
            city=body.city,
            conditions=CONDITIONS[digest[0] % len(CONDITIONS)],
            temperature_celsius=digest[1] % 45 - 10,
        )

    async def verify(self, body: SingleToolCallVerifyRequest) -> SingleToolCallVerifyResponse:  # type: ignore[override]
        """Reward 1.0 if `get_weather` was called for the expected city and for no other, else 0.0.

        Calls whose arguments the tool would not take (invalid JSON, a missing or an unknown argument) don't count,
        neither for nor against.
        """
        cities = called_cities(body.response)
        right = bool(cities) and all(comparable(city) == comparable(body.expected_city) for city in cities)
        return SingleToolCallVerifyResponse(**{**dict(body), "reward": float(right), "called_cities": cities})


def called_cities(response: NeMoGymResponse) -> list[str]:
    """Return the cities of all proper calls of `get_weather` in a trajectory, in order."""
    cities: list[str] = []
    for item in response.output:
        if isinstance(item, NeMoGymResponseFunctionToolCall) and item.name == "get_weather":
            try:
                cities.append(GetWeatherRequest.model_validate(json.loads(item.arguments)).city)
            except (ValidationError, json.JSONDecodeError):
                continue
    return cities


def comparable(city: str) -> str:
    """Return a city's name for comparison: without case, accents, and what follows a comma ("Paris, France")."""
    letters = unicodedata.normalize("NFKD", city.split(",")[0]).casefold()
    return " ".join("".join(letter for letter in letters if not unicodedata.combining(letter)).split())


if __name__ == "__main__":
    SingleToolCallResourcesServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = SingleToolCallResourcesServer.run_webserver()
