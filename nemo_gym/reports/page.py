"""The page: what is known, the texts in blocks, and the program that shows them, in one HTML file.

Texts in a rollout come from models, tools and datasets and are trusted with nothing. None of them stands in the HTML:
all data is in base64 inside elements the browser does not run, and the program puts texts into the page as text only.
The page's Content-Security-Policy names the two scripts that may run by their digests and lets nothing be loaded from
anywhere; it allows inline styles because plotly.js sets some, and `data:` images for what a model was shown.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from nemo_gym.errors import NemoGymError, UsageError
from nemo_gym.reports.blocks import packed, to_json

MARK: Final = b"<!doctype html>\n<!-- made by gym eval report -->\n"
"""How every report begins, so that nothing else is replaced by one."""

_SCRIPTS: Final = (
    "data.js",
    "search.js",
    "parts.js",
    "items.js",
    "reader.js",
    "list.js",
    "summary.js",
    "plots.js",
    "main.js",
)


def page(facts: dict[str, Any], blocks: Iterable[bytes], title: str) -> Iterator[bytes]:
    """Yield a report's bytes in order.

    Args:
        facts: What the page's program knows from the start: index, figures, comparison.
        blocks: The rollouts, as `BlockStore.read` yields them.
        title: The page's title.
    """
    program, plotly = _program(), _plotly()
    shell = _static("report.html")
    head, body_and_end = shell.split("<!-- data -->")
    policy = (
        f"default-src 'none'; script-src {_digest(program)} {_digest(plotly)}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    filled = (
        head.replace("{policy}", policy)
        .replace("{style}", _static("report.css"))
        .replace("{title}", html.escape(title))
    )
    yield MARK + filled.encode("utf-8", "replace")  # a file's name may be no text
    yield _data("facts", packed(to_json(facts)))
    yield f"<script>{program}</script>\n".encode()
    yield _data("plotly", packed(plotly.encode()))
    for number, block in enumerate(blocks):
        yield _data(f"block-{number}", block)
    yield body_and_end.encode()


def write_page(path: Path, content: Iterable[bytes]) -> None:
    """Write a page, replacing an older report at once; on a failure nothing is changed.

    Raises:
        UsageError: The file exists and is no report.
        NemoGymError: It can't be written.
    """
    check_replaceable(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        try:
            with temporary.open("wb") as file:
                file.writelines(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise NemoGymError(f"can't write {path}: {error.strerror}") from error


def check_replaceable(path: Path) -> None:
    """Check that nothing but an older report stands where a report shall be written.

    Raises:
        UsageError: Something else does, or the folder is missing.
    """
    try:
        if not path.parent.is_dir():
            raise UsageError(f"can't write {path}: there is no folder {path.parent}")
        if not path.exists():
            return
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(MARK)) in (MARK, b""):
                    return
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from error
    raise UsageError(f"{path} exists and is no report; choose another --output")


def _data(name: str, content: bytes) -> bytes:
    return b'<script type="application/x-deflate" id="' + name.encode() + b'">' + content + b"</script>\n"


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _static(name: str) -> str:
    return (files("nemo_gym.reports") / "static" / name).read_text(encoding="utf-8")


def _program() -> str:
    parts = "\n".join(_static(name) for name in _SCRIPTS)
    return f'\n"use strict";\n(() => {{\n{parts}\n}})();\n'


def _plotly() -> str:
    return str(get_plotlyjs())
