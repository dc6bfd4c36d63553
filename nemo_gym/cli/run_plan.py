"""What a call of `gym eval run` means: which agent, which rows, and where the results go."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from nemo_gym.cli.selection import iter_instances
from nemo_gym.errors import UsageError, did_you_mean
from nemo_gym.global_config import POLICY_MODEL_KEY_NAME, POLICY_MODEL_NAME_KEY_NAME
from nemo_gym.paths import find_file

RESULTS_FOLDER: Final = "results"
ROLLOUTS_FILE: Final = "rollouts.jsonl"


@dataclass(frozen=True, slots=True)
class Instance:
    """A server of the configuration: its name, kind, implementation and settings."""

    name: str
    kind: str
    implementation: str
    settings: Mapping[str, Any]

    def reference(self, key: str) -> str | None:
        """Return the name of the server that the reference under `key` means."""
        reference = self.settings.get(key)
        return reference.get("name") if isinstance(reference, Mapping) else None


class RunPlan:
    """Fills in what a call left out, from the configuration that will serve it.

    Args:
        config: The resolved configuration as plain values.
        agent: The agent that was named, if one was.

    Raises:
        UsageError: The configuration has no agent, or none of that name.
    """

    def __init__(self, config: Mapping[str, Any], agent: str | None) -> None:
        self._config = config
        self._instances = [Instance(*entry) for entry in iter_instances(config)]
        agents = [one for one in self._instances if one.kind == "responses_api_agents"]
        if not agents:
            raise UsageError("the configuration has no agent to run rollouts\nAdd one: --agent NAME")
        if agent is not None:
            agents = [one for one in agents if one.name == agent] or self._unknown_agent(agent, agents)
        self._agents = agents

    @property
    def agent(self) -> str | None:
        """The agent of every row; None when the configuration has several and each row must say which."""
        return self._agents[0].name if len(self._agents) == 1 else None

    @property
    def environment(self) -> str:
        """The name under which results are kept: that of the resources server, else of the agent."""
        return "+".join(dict.fromkeys(self._resources_server(one) or one.name for one in self._agents))

    def input_path(self, given: Path | None) -> Path:
        """Return the file of rows: the given one, else the example dataset of the agent's environment.

        A relative path is looked for in the working directory first, then where components are.

        Raises:
            UsageError: There is no such file, or no example dataset, or several agents to choose one from.
        """
        if given is not None:
            return _input_file(given)
        path = self._example_dataset()["jsonl_fpath"]
        found = find_file(path)
        if found is None:
            raise UsageError(
                f"the example dataset {path} of the agent {self.agent} does not exist\n"
                "Say which rows to run: --input FILE."
            )
        return found

    def dataset_repeats(self) -> int:
        """Return how many rollouts each row of the example dataset gets, as its configuration says.

        Raises:
            UsageError: There is no example dataset, or several agents to choose one from.
        """
        repeats: int = self._example_dataset().get("num_repeats", 1)
        return repeats

    def run_settings(self) -> dict[str, Any]:
        """Return what must stay the same when a run is resumed: which model it asks."""
        model = next((one for one in self._instances if one.name == POLICY_MODEL_KEY_NAME), None)
        settings = {"model_type": model.implementation if model else None}
        return {**settings, POLICY_MODEL_NAME_KEY_NAME: self._config.get(POLICY_MODEL_NAME_KEY_NAME)}

    def _example_dataset(self) -> Mapping[str, Any]:
        """Return the agent's first dataset of examples; else one of another that serves the same environment."""
        if len(self._agents) > 1:
            names = ", ".join(one.name for one in self._agents)
            raise UsageError(f"which agent? The configuration has {names}\nSay --agent NAME, or --input FILE.")
        agent = self._agents[0]
        server = self._resources_server(agent)
        others = [one for one in self._instances if server and server in (one.name, self._resources_server(one))]
        for instance in [agent, *others]:
            for dataset in instance.settings.get("datasets") or ():
                if dataset.get("type") == "example":
                    found: Mapping[str, Any] = dataset
                    return found
        raise UsageError(f"the agent {agent.name} has no dataset of type example\nSay which rows to run: --input FILE.")

    def _resources_server(self, instance: Instance) -> str | None:
        """Return the resources server that an agent works for, itself or through the agent that it relays to."""
        seen: set[str] = set()
        while instance.name not in seen:
            seen.add(instance.name)
            server = instance.reference("resources_server")
            relayed = next((one for one in self._instances if one.name == instance.reference("agent_server")), None)
            if server or relayed is None:
                return server
            instance = relayed
        return None

    def _unknown_agent(self, agent: str, agents: list[Instance]) -> list[Instance]:
        names = [one.name for one in agents]
        hint = did_you_mean(agent, names) or f"It has: {', '.join(names)}."
        raise UsageError(f"--agent {agent}: the configuration has no agent of this name\n{hint}")


def _input_file(given: Path) -> Path:
    with _path_errors("--input", given):
        found = given if given.is_file() else find_file(given)
        if found is not None:
            return found
        if given.is_dir():
            raise UsageError(f"--input {given}: expected a file, this is a folder")
        if given.exists():
            raise UsageError(f"--input {given}: expected a regular file, for the rows are read twice")
    raise UsageError(f"--input {given}: there is no such file")


@contextmanager
def _path_errors(option: str, path: Path) -> Iterator[None]:
    """Turn what the system says of an impossible path (too long, say) into an error of the call."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from error


def output_path(environment: str, given: Path | None, *, resume: bool, overwrite: bool) -> Path:
    """Return the file for results: the given one, else one in a new folder, or in the newest one to resume.

    Raises:
        UsageError: There is nothing to resume, or results that were neither to be resumed nor overwritten.
    """
    if given is not None:
        with _path_errors("--output", given):
            if given.is_dir():
                raise UsageError(f"--output {given}: expected a file, this is a folder")
            if not (resume or overwrite) and given.exists() and given.stat().st_size:
                raise UsageError(
                    f"{given} holds results already\n"
                    "Continue them with --resume, replace them with --overwrite, or choose another file."
                )
        return given
    base = Path(RESULTS_FOLDER) / environment
    if resume:
        earlier = sorted(base.glob(f"*/{ROLLOUTS_FILE}"))
        if not earlier:
            raise UsageError(f"there is nothing to resume in {base}\nRun without --resume, or name the --output file.")
        return earlier[-1]
    # Two calls may begin within one second.
    return base / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}" / ROLLOUTS_FILE
