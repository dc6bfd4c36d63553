"""Runs the tests that components bring along, each component in a pytest process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nemo_gym.errors import UsageError
from nemo_gym.paths import component_roots

_NO_TESTS_COLLECTED: Final = 5


@dataclass(frozen=True, slots=True)
class TestResult:
    """What became of one component's tests.

    Args:
        kind: The kind of component.
        name: Its folder's name.
        outcome: `no tests` when it has none.
    """

    # Not a test class, whatever its name looks like to pytest.
    __test__ = False

    kind: str
    name: str
    outcome: Literal["passed", "failed", "no tests"]


def check_pytest() -> None:
    """Make sure that pytest is installed.

    Raises:
        UsageError: It is not; with what to install.
    """
    if importlib.util.find_spec("pytest") is None:
        raise UsageError("pytest is not installed\nInstall the dev extra: pip install 'nemo-gym[dev]'")


def run_tests(folder: Path, pytest_arguments: Sequence[str] = ()) -> TestResult:
    """Run the tests in `folder / "tests"` from the root that holds the component, with the output passed through."""
    kind, name = folder.parent.name, folder.name
    tests = folder / "tests"
    if not tests.is_dir():
        return TestResult(kind, name, "no tests")
    root = folder.parent.parent
    python_path = [str(path) for path in dict.fromkeys([root, *component_roots()])]
    if inherited := os.environ.get("PYTHONPATH"):
        python_path.append(inherited)
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(tests),
        "--import-mode=importlib",
        # Else pytest takes the folder of this component's kind for the whole of it, and ours can't be imported.
        "-o",
        "consider_namespace_packages=true",
        # An installed root may be read-only, and is no place for a cache.
        "-p",
        "no:cacheprovider",
        *_async_arguments(),
        *pytest_arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path), "PYTHONDONTWRITEBYTECODE": "1"}
    code = subprocess.run(command, cwd=root, env=environment, check=False).returncode  # noqa: S603
    outcome: Literal["passed", "failed", "no tests"] = "passed" if code == 0 else "failed"
    return TestResult(kind, name, "no tests" if code == _NO_TESTS_COLLECTED else outcome)


def _async_arguments() -> list[str]:
    """Let plain `async def` tests run as they stand, unless pytest-asyncio is there to run them."""
    return [] if importlib.util.find_spec("pytest_asyncio") else ["-o", "anyio_mode=auto"]
