"""Types of command-line arguments; what they refuse is told before anything is run."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path


def positive(text: str) -> int:
    """Return a number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def output_file(text: str) -> Path:
    """Return the path of a file that can be written; what it holds stays until then."""
    path = Path(text)
    is_there = path.exists()
    # A pipe or a device shows only when it is written to.
    if is_there and not path.is_file() and not path.is_dir():
        return path
    try:
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        raise ArgumentTypeError(
            f"can't write {text!r}: {error.strerror}; name a file in a folder that exists"
        ) from None
    return path
