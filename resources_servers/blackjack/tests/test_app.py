"""Plays hands over HTTP, in this process, and whole runs of the command `gym`; the table is the package's own."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from nemo_gym.base_gymnasium_server import GymnasiumServerConfig
from nemo_gym.errors import MissingExtraError
from nemo_gym.server_utils import ServerClient
from resources_servers.blackjack.app import REWARDS, BlackjackResourcesServer, Outcome

gymnasium = pytest.importorskip("gymnasium")

FOLDER = Path(__file__).parents[1]
ROWS = [json.loads(line) for line in (FOLDER / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines()]
RESPONSE = {"id": "resp_1", "created_at": 0, "model": "test", "object": "response", "output": []}


def build(**settings: Any) -> FastAPI:
    config = GymnasiumServerConfig(host="", port=0, entrypoint="", name="blackjack", **settings)
    return BlackjackResourcesServer(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()


class Hand:
    """One session: a hand that is being played."""

    def __init__(self, app: FastAPI, **row: Any) -> None:
        self.client = TestClient(app)
        self.seeded = self.client.post("/seed_session", json=row).json()
        self.seen = self.seeded["observation"]

    def step(self, action: Any) -> Any:
        return self.client.post("/step", json={"action": action})

    def play(self, threshold: int) -> "Hand":
        """Hit below a sum, then stick."""
        over = False
        while not over:
            reply = self.step("hit" if self.seen["player_sum"] < threshold else "stick").json()
            self.seen, over = reply["observation"], reply["terminated"]
        return self

    def verify(self, **row: Any) -> Any:
        body = {"responses_create_params": {"input": "play"}, "response": RESPONSE, **row}
        return self.client.post("/verify", json=body).json()


def played_directly(seed: int, threshold: int, **rules: Any) -> float:
    """Return what the package itself pays for a hand."""
    table = gymnasium.make("Blackjack-v1", **rules)
    (total, _, _), _ = table.reset(seed=seed)
    over = False
    while not over:
        (total, _, _), paid, over, _, _ = table.step(1 if total < threshold else 0)
    table.close()
    return float(paid)


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("create_examples", FOLDER / "create_examples.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return build()


def test_hands_go_as_the_package_plays_them_and_all_outcomes_occur(app: FastAPI) -> None:
    outcomes = set()
    for seed in range(60):
        verdict = Hand(app, seed=seed).play(17).verify(id=f"row-{seed}")
        paid = played_directly(seed, 17)
        assert verdict["episode_return"] == paid
        assert verdict["reward"] == {1.0: 1.0, 0.0: 0.5, -1.0: 0.0}[paid]
        assert verdict["reward"] == REWARDS[verdict["outcome"]]
        assert (verdict["terminated"], verdict["id"]) == (True, f"row-{seed}")
        outcomes.add(verdict["outcome"])
    assert outcomes == {Outcome.WON, Outcome.DRAWN, Outcome.LOST}


def test_the_same_seed_is_the_same_hand_and_another_seed_another(app: FastAPI) -> None:
    def story(seed: int) -> list[Any]:
        hand = Hand(app, seed=seed)
        return [hand.seen, *(hand.step(action).json() for action in ("hit", "stick"))]

    assert story(5) == story(5)
    assert len({json.dumps(Hand(app, seed=seed).seen) for seed in range(20)}) > 5


def test_natural_pays_more_and_is_a_win_all_the_same(app: FastAPI) -> None:
    rules = {"sab": False, "natural": True}
    seed = next(seed for seed in range(500) if played_directly(seed, 21, **rules) == 1.5)
    verdict = Hand(app, seed=seed, **rules).play(21).verify()
    assert (verdict["reward"], verdict["episode_return"], verdict["outcome"]) == (1.0, 1.5, "won")
    assert Hand(app, seed=seed).play(21).verify()["episode_return"] == 1.0


def test_the_dealers_second_card_is_shown_to_nobody(app: FastAPI) -> None:
    hand = Hand(app, seed=1)
    assert hand.seeded.keys() == {"observation", "info"}
    assert hand.seen.keys() == {"player_sum", "dealer_card", "usable_ace"}
    assert hand.seeded["info"] == {}
    assert hand.client.post("/observe", json={}).json()["observation"] == hand.seen


def test_a_step_after_the_end_says_so_and_the_verdict_stands(app: FastAPI) -> None:
    hand = Hand(app, seed=3).play(17)
    verdict = hand.verify()
    late = hand.step("hit")
    assert (late.status_code, "the episode is over" in late.json()["detail"]) == (409, True)
    assert hand.verify() == verdict


def test_a_hand_that_is_not_played_to_its_end_earns_nothing_whatever_the_model_says(app: FastAPI) -> None:
    hand = Hand(app, seed=3)
    part = {"type": "output_text", "text": "I have won!", "annotations": []}
    said = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}]
    verdict = hand.verify(response={**RESPONSE, "output": said}, reward=1.0, outcome="won")
    assert (verdict["reward"], verdict["outcome"]) == (0.0, "unfinished")


@pytest.mark.parametrize("action", ["double", "Hit", 1, None, ["hit"]])
def test_what_is_no_action_is_refused_and_changes_nothing(app: FastAPI, action: Any) -> None:
    hand = Hand(app, seed=3)
    assert hand.step(action).status_code == 422
    assert hand.client.post("/observe", json={}).json() == {
        "observation": hand.seen,
        "steps": 0,
        "terminated": False,
        "truncated": False,
    }


def test_a_session_that_was_never_seeded_is_refused(app: FastAPI) -> None:
    assert TestClient(app).post("/step", json={"action": "hit"}).status_code == 410


def test_the_tools_of_the_rows_are_those_of_the_server(app: FastAPI) -> None:
    schemas = app.openapi()["components"]["schemas"]
    offered = {tool["name"]: tool["parameters"] for tool in ROWS[0]["responses_create_params"]["tools"]}
    assert schemas["BlackjackStepRequest"]["properties"]["action"]["enum"] == ["hit", "stick"]
    assert offered["step"]["properties"]["action"]["enum"] == ["hit", "stick"]
    assert set(offered) == {"step", "observe"}


def test_without_the_package_the_start_up_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtraError, match=r"nemo-gym\[gymnasium\]"):
        build()


def test_every_example_row_can_be_seeded_and_they_are_as_their_script_writes_them(app: FastAPI) -> None:
    assert len(ROWS) >= 20
    assert len({row["id"] for row in ROWS}) == len({row["seed"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert Hand(app, **row).play(12).verify(**row)["id"] == row["id"]
    assert load_script().main(["--check"]) == 0


def test_a_whole_run_is_scored_as_the_table_has_it(tmp_path: Path) -> None:
    """The embedded model plays by the rule that a row gives, on four workers."""
    command = [sys.executable, "-m", "nemo_gym.cli", "eval", "run", "--resources-server", "blackjack"]
    done = subprocess.run(
        [*command, "--output", "out.jsonl"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(results) == len(ROWS)
    script = load_script()
    thresholds = dict(script.RULED)
    outcomes = Counter()
    for result in results:
        text = result["responses_create_params"]["input"][-1]["content"]
        if text in thresholds:
            assert result["episode_return"] == played_directly(result["seed"], thresholds[text]), result["id"]
        if text in script.FREE:
            # The embedded model follows rules and has no judgement.
            assert result["outcome"] == "unfinished", result["id"]
        else:
            outcomes[result["outcome"]] += 1
    assert outcomes.keys() == {"won", "drawn", "lost"}
