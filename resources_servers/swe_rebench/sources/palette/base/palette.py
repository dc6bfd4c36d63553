"""The colours of the product, from a file of three bytes for each."""

from pathlib import Path


def colours():
    """Return the colours as triples of red, green and blue."""
    data = Path(__file__).with_name("assets").joinpath("palette.bin").read_bytes()
    return [tuple(data[start : start + 3]) for start in range(0, len(data), 3)]
