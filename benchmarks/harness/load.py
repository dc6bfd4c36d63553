"""Load generators as processes: started with a job, told when to begin, and gone at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.harness.run import ROOT

PATIENCE_S: Final = 120.0
_LONGEST_LINE: Final = 2**24
_SHOWN_ERROR: Final = 400


class LoadError(Exception):
    """Raised when a load generator gives up, or takes too long."""


class LoadGenerator:
    """One load generator; entering it waits until it is ready.

    Args:
        kind: The module of `benchmarks.load`.
        job: What it is to do.
    """

    def __init__(self, kind: str, job: dict[str, Any]) -> None:
        self._kind = kind
        self._job = job
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        python_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"benchmarks.load.{self._kind}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path)},
            # Ctrl-C is for the benchmark, which ends the others in order.
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        try:
            self._write(json.dumps(self._job))
            await self._read()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def go(self) -> dict[str, Any]:
        """Let it do its work, or the next part of it, and return what it tells.

        Raises:
            LoadError: It gave up, or took longer than any benchmark's part is meant to.
        """
        self._write("go")
        return await self._read()

    async def told(self) -> dict[str, Any]:
        """Return what it tells next, without being asked: the end of a part, or that it is ready for the next."""
        return await self._read()

    def _write(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            async with asyncio.timeout(PATIENCE_S):
                line = await self._process.stdout.readline()
                if not line:
                    error = (await self._process.stderr.read()).decode("utf-8", "replace").strip()
                    last_line = error.rpartition("\n")[2]
                    raise LoadError(f"the load generator {self._kind} gave up: {last_line[-_SHOWN_ERROR:]}")
        except TimeoutError:
            raise LoadError(f"the load generator {self._kind} said nothing for {PATIENCE_S:g} s") from None
        message: dict[str, Any] = json.loads(line)
        return message

    async def _end(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
