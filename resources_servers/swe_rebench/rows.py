"""One task of the public SWE-rebench-V2 dataset, typed; and its fields as requests carry them.

The dataset's exports differ in small ways, all of which are read: lists of tests also as JSON-encoded strings,
`install` and `test_cmd` as one command or a list of them. Fields that nothing here needs are let through.
"""

import hashlib
import json
import re
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from resources_servers.swe_rebench.log_parsers import LogParser, find_log_parser

_COMMIT: Final = re.compile(r"[0-9a-f]{7,64}")
_SHOWN: Final = 80


def _names(value: Any) -> Any:
    """A list of names, also when it comes as the JSON text of one."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list):
        # pydantic reports a ValueError only.
        raise ValueError(f"expected a list of test names or its JSON text, not {value[:_SHOWN]!r}")  # noqa: TRY004
    return parsed


def _commands(value: Any) -> Any:
    """A list of commands, also when it is a single one; None and blank commands are none."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(command, str) for command in value):
        raise ValueError(f"expected a shell command or a list of them, not {value!r:.80}")
    return [command for command in value if command.strip()]


def _decoded(value: Any) -> Any:
    """A mapping, also when it comes as the JSON text of one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"expected an object or its JSON text, not {value[:_SHOWN]!r}: {error}") from error


TestNames = Annotated[list[str], BeforeValidator(_names)]
Commands = Annotated[list[str], BeforeValidator(_commands)]


class InstallConfig(BaseModel):
    """How a repository is installed and tested.

    Attributes:
        install: The commands that install it, run after the patches are applied; often none, as images come
            installed.
        test_cmd: The commands that run the tests. Each runs, also when one before it failed.
        log_parser: What reads their output; see `log_parsers.LOG_PARSERS`.
        test_timeout_s: How long they may take together; the server's setting where it is less or this is None.
    """

    model_config = ConfigDict(extra="allow")

    install: Commands = Field(default_factory=list)
    test_cmd: Commands
    log_parser: str
    test_timeout_s: float | None = Field(default=None, gt=0)

    @field_validator("test_cmd")
    @classmethod
    def _some_command(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("there is no test command, so nothing could be judged")
        return value

    @field_validator("log_parser")
    @classmethod
    def _known_parser(cls, value: str) -> str:
        find_log_parser(value)
        return value

    @property
    def parser(self) -> LogParser:
        """The parser that `log_parser` names."""
        return find_log_parser(self.log_parser)


class SweRebenchRow(BaseModel):
    """One task.

    Attributes:
        instance_id: The task's name.
        repo: The repository, as "owner/name".
        base_commit: The commit that the agent starts from.
        image_name: The image that holds the repository; for the local provider a folder of its `images_dir`.
        patch: The reference solution ("golden patch").
        test_patch: The change of the tests that comes with it; the agent never sees it.
        problem_statement: What the agent is told.
        install_config: How to install and test.
        FAIL_TO_PASS: Tests that fail before the solution and pass after it.
        PASS_TO_PASS: Tests that pass before and after.
    """

    instance_id: str = Field(min_length=1)
    repo: str = Field(min_length=1)
    base_commit: str
    image_name: str = Field(min_length=1)
    patch: str = ""
    test_patch: str = ""
    problem_statement: str = ""
    install_config: Annotated[InstallConfig, BeforeValidator(_decoded)]
    FAIL_TO_PASS: TestNames
    PASS_TO_PASS: TestNames = Field(default_factory=list)

    @field_validator("base_commit")
    @classmethod
    def _a_commit(cls, value: str) -> str:
        # It becomes part of a command.
        if not _COMMIT.fullmatch(value):
            raise ValueError(f"expected the hexadecimal name of a commit, 7 to 64 digits, not {value[:_SHOWN]!r}")
        return value

    @field_validator("FAIL_TO_PASS")
    @classmethod
    def _some_test(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("names no test, so any work at all would be rewarded")
        return value

    @property
    def digest(self) -> str:
        """A hash of all that is said about the task, to tell one version of a row from another."""
        fields = self.model_dump(include=set(SweRebenchRow.model_fields))
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def repository_name(self) -> str:
        """The last part of `repo`."""
        return self.repo.rstrip("/").rsplit("/", 1)[-1]
