"""Write `data/example.jsonl`: hands of blackjack, some to be played by a given rule, some as one likes.

    python create_examples.py            write the file
    python create_examples.py --check    exit with 1 if the file is not what would be written

A row is a deck (`seed`) and an instruction. What comes of it is for the table to say: no row knows its outcome.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "data" / "example.jsonl"

RULES = (
    "You play one hand of blackjack against a dealer. Cards from two to ten count their number, faces ten, an ace "
    "eleven or one. Whoever is nearer to twenty-one wins; above it you have lost. You see the sum of your cards and "
    "the dealer's open card. Call observe to look at the table, and step to act: hit takes a card, stick ends your "
    "turn, and the dealer then draws up to seventeen. The hand is over when a step answers terminated: true."
)

TOOLS = [
    {
        "type": "function",
        "name": "observe",
        "description": "Look at your hand and at the dealer's open card.",
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
        "strict": True,
    },
    {
        "type": "function",
        "name": "step",
        "description": "Take another card (hit), or leave it at those you have (stick).",
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string", "enum": ["hit", "stick"]}},
            "required": ["action"],
            "additionalProperties": False,
        },
        "strict": True,
    },
]

# The actions are in the text: nothing that the table shows changes them.
FIXED = [
    'Step "stick".',
    'Step "hit", then step "stick".',
    'Observe the table. Step "stick" at once.',
    'First observe, then step "hit", and step "stick".',
    'Step "hit" and "hit", then step "stick".',
    'Observe the table, step "hit", observe it, and step "stick".',
]
# Each card decides about the next action: hit below this sum, else stick.
RULED = [
    ("Hit while your sum is below 17, then stick.", 17),
    ("Hit while your sum is below 12, then stick.", 12),
    ("Hit as long as your sum is under 15, then stick.", 15),
    ("Play carefully: hit while your sum is less than 13, and then stick.", 13),
    ("Hit until your sum is at least 18, then stick.", 18),
    ("Hit until your sum reaches 16. Then stick.", 16),
    ("Hit while the player sum is at most 14; otherwise stick.", 15),
    ("Play the hand like the dealer does. Hit until your sum is 17 or more, then stick.", 17),
    ("Hit while your sum is lower than 20, then stick.", 20),
    ("Let us be bold! Hit as long as your sum is not above 18, then stick.", 19),
]
FREE = [
    "Play the hand as well as you can.",
    "Try to win this hand.",
]


def rows() -> Iterator[dict[str, Any]]:
    """Yield the rows, the same at every call."""
    texts = [*FIXED, *(text for text, _ in [*RULED, *RULED[:8]]), *FREE, *FREE]
    for number, text in enumerate(texts):
        yield {
            "id": f"blackjack-{number:02d}",
            "responses_create_params": {
                "input": [{"role": "developer", "content": RULES}, {"role": "user", "content": text}],
                "tools": TOOLS,
                "parallel_tool_calls": False,
            },
            "seed": 100 + number,
        }


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the example rows of the blackjack environment.")
    parser.add_argument("--check", action="store_true", help="only compare the file with what would be written")
    options = parser.parse_args(arguments)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())
    if options.check:
        same = OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text
        sys.stderr.write(f"{OUTPUT}: {'up to date' if same else 'differs; run create_examples.py'}\n")
        return 0 if same else 1
    OUTPUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
