"""The texts of all rollouts, compressed in blocks that a browser reads one at a time.

A block is a few hundred kilobytes of JSON lines, deflated and in base64: small enough to be opened in a moment when
one of its rollouts is looked at, large enough to compress well. Blocks wait in a temporary file until the page that
holds them is written, so memory holds one of them.
"""

from __future__ import annotations

import base64
import json
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

import orjson

BLOCK_BYTES: Final = 256 * 1024


def packed(content: bytes) -> bytes:
    """Return bytes as the page holds them: deflated (RFC 1950), in base64."""
    return base64.b64encode(zlib.compress(content, 6))


class BlockStore:
    """Records on their way into a page; a context manager.

    Args:
        folder: Where the temporary file is made; the page's own folder has room for it, `/tmp` perhaps has not.
        block_bytes: From how many bytes of JSON on a block is full.
    """

    def __init__(self, folder: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._block_bytes = block_bytes
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self.blocks = 0

    def add(self, record: dict[str, Any]) -> tuple[int, int]:
        """Add a record; returns its block and its place in the block."""
        line = to_json(record)
        place = (self.blocks, len(self._waiting))
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes >= self._block_bytes:
            self._flush()
        return place

    def read(self) -> Iterator[bytes]:
        """Yield all blocks in order, as `packed` makes them."""
        self._flush()
        self._file.seek(0)
        for line in self._file:
            yield line.rstrip(b"\n")

    def _flush(self) -> None:
        if self._waiting:
            self._file.write(packed(b"\n".join(self._waiting)) + b"\n")
            self._waiting, self._waiting_bytes = [], 0
            self.blocks += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def to_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8 on one line; text that is no Unicode (a lone surrogate) gets question marks."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
