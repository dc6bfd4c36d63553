"""One hand of blackjack against the dealer: `Blackjack-v1` of the `gymnasium` package, a table per session.

The model sees its own sum and the dealer's one open card; the dealer's other card and the deck are hidden state on the
server. It hits or sticks until the hand is over. The reward is what the table says: won 1.0, drawn 0.5, else 0.0.
"""

from __future__ import annotations

from enum import StrEnum
from types import ModuleType
from typing import Any, ClassVar, Final, Literal

from fastapi import FastAPI, Request
from pydantic import JsonValue

from nemo_gym.base_gymnasium_server import (
    Environment,
    Episode,
    GymnasiumSeedSessionRequest,
    GymnasiumSeedSessionResponse,
    GymnasiumServer,
    StepRequest,
    StepResponse,
)
from nemo_gym.errors import MissingExtraError
from nemo_gym.server_utils import is_nemo_gym_fastapi_entrypoint

ACTIONS: Final = {"stick": 0, "hit": 1}


class Outcome(StrEnum):
    """How a hand went. A hand that was never played to its end is unfinished."""

    WON = "won"
    DRAWN = "drawn"
    LOST = "lost"
    UNFINISHED = "unfinished"


REWARDS: Final = {Outcome.WON: 1.0, Outcome.DRAWN: 0.5, Outcome.LOST: 0.0, Outcome.UNFINISHED: 0.0}


class BlackjackSeedSessionRequest(GymnasiumSeedSessionRequest):
    """The deck, by its `seed`, and the rules of the table, which are those of `Blackjack-v1` unless set.

    Attributes:
        sab: The rules of Sutton and Barto's book: an ace and a ten from the start win, unless the dealer has them too.
        natural: Without `sab`: an ace and a ten from the start pay one and a half times.
    """

    sab: bool = True
    natural: bool = False


class BlackjackStepRequest(StepRequest):
    """Take another card (hit), or leave it at those you have (stick)."""

    action: Literal["hit", "stick"]


class BlackjackResourcesServer(GymnasiumServer):
    """Serves the tables."""

    in_threads: ClassVar[bool] = False

    def setup_webserver(self) -> FastAPI:
        """Return the application, after making sure at start-up that the package is there."""
        load_package()
        return super().setup_webserver()

    def make_environment(self, body: BlackjackSeedSessionRequest) -> Environment:
        """Return a table with a deck of its own."""
        table: Environment = load_package().make(
            "Blackjack-v1", sab=body.sab, natural=body.natural, disable_env_checker=True
        )
        return table

    def to_action(self, episode: Episode, action: Any) -> int:
        """Return the number that the package has for a word."""
        return ACTIONS[action]

    def to_json(self, observation: tuple[int, int, int]) -> JsonValue:
        """Name what the package tells by position. An ace counts 1, or 11 while it is usable."""
        player_sum, dealer_card, usable_ace = observation
        return {
            "player_sum": int(player_sum),
            "dealer_card": int(dealer_card),
            "usable_ace": bool(usable_ace),
        }

    def score(self, episode: Episode) -> float:
        """Reward 1.0 for a hand won, 0.5 for one drawn, 0.0 for one lost or not played to its end."""
        return REWARDS[outcome_of(episode)]

    def verdict(self, episode: Episode) -> dict[str, Any]:
        """Say the outcome in a word as well."""
        return {**super().verdict(episode), "outcome": outcome_of(episode)}

    async def seed_session(  # type: ignore[override]
        self, request: Request, body: BlackjackSeedSessionRequest
    ) -> GymnasiumSeedSessionResponse:
        """Deal two cards each."""
        return await super().seed_session(request, body)

    async def step(self, request: Request, body: BlackjackStepRequest) -> StepResponse:  # type: ignore[override]
        """Take another card (hit), or leave it at yours (stick). The hand is over once `terminated` is true."""
        return await super().step(request, body)


def outcome_of(episode: Episode) -> Outcome:
    """Return how a hand went."""
    if not episode.over:
        return Outcome.UNFINISHED
    if episode.total_reward == 0:
        return Outcome.DRAWN
    return Outcome.WON if episode.total_reward > 0 else Outcome.LOST


def load_package() -> ModuleType:
    """Import and return the package.

    Raises:
        MissingExtraError: If it is not installed.
    """
    try:
        import gymnasium  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("gymnasium", "the blackjack resources server") from error
    return gymnasium


if __name__ == "__main__":
    BlackjackResourcesServer.run_webserver()
elif is_nemo_gym_fastapi_entrypoint(__file__):
    app = BlackjackResourcesServer.run_webserver()
