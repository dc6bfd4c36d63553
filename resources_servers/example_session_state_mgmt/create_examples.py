"""Write `data/example.jsonl`: fifty instructions for the counter, each worded differently.

    python create_examples.py            write the file
    python create_examples.py --check    exit with 1 if the file is not what would be written

A pattern is a sentence with slots, and how often each slot's amount counts: `b=-1` for "take away {b}", `a=3` for
"three times {a}". So `expected_count` follows from the pattern and does not depend on anyone's reading of the text.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "data" / "example.jsonl"
SEED = 20

TOOLS = [
    {
        "type": "function",
        "name": "increment_counter",
        "description": "Add an amount to the counter. A negative amount takes away.",
        "parameters": {
            "type": "object",
            "properties": {"count": {"type": "integer", "description": "The amount to add."}},
            "required": ["count"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    {
        "type": "function",
        "name": "get_counter_value",
        "description": "Read the counter.",
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
        "strict": True,
    },
]

SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

ONE = "one"

# Slots: {a} in digits, {a:w} in words. The numbers: how often each slot's amount counts; `ONE` is no slot but 1.
PATTERNS: list[tuple[str, dict[str, int]]] = [
    ("Add {a} to the counter and tell me what it shows.", {"a": 1}),
    ("Add {a}, then add {b}, then get the count.", {"a": 1, "b": 1}),
    ("Please increase the counter by {a:w} and report its value.", {"a": 1}),
    ("Increment the counter by {a}. Then increment it by {b}. Finally, what is the total?", {"a": 1, "b": 1}),
    ("What does the counter read right now?", {}),
    ("Could you bump the counter up by {a:w} and then by another {b:w}? Let me see the result.", {"a": 1, "b": 1}),
    ("Subtract {a} from the counter and show me where it stands.", {"a": -1}),
    ("Raise it by {a:w}, lower it by {b:w}, and tell me the value you end up with.", {"a": 1, "b": -1}),
    ("I need the counter to go up by {a} and after that by {b}; then read it out.", {"a": 1, "b": 1}),
    ("Tell me the counter's value after adding {a} and {b}.", {"a": 1, "b": 1}),
    ("Before you read the counter, add {a:w} to it.", {"a": 1}),
    ("Just look at the counter and tell me the number, please; there is nothing to change.", {}),
    ("Three times in a row, add {a} to the counter. What is the count then?", {"a": 3}),
    ("Increase the counter by {a:w} twice, and give me the final number.", {"a": 2}),
    ("Apply these increments in order: {a}, {b}, {c}. Then report the count.", {"a": 1, "b": 1, "c": 1}),
    ("Take {a} away from the counter, then put {b} on, and check what it shows.", {"a": -1, "b": 1}),
    ("Add minus {a:w} to the counter and show the result.", {"a": -1}),
    (
        "Increment by {a}, by {b}, by {c} and by {d}, one after another. Where does the counter end up?",
        {"a": 1, "b": 1, "c": 1, "d": 1},
    ),
    ("Add zero to the counter and tell me whether it still reads the same.", {}),
    ("Count up by {a:w}; what number do you see?", {"a": 1}),
    ("Hi! Someone asked me for the current count. Can you check it?", {}),
    ("Please add {a} to the counter four times, then fetch the value.", {"a": 4}),
    ("Reduce the counter by {a:w}. Next, increase it by {b}. How much is on it?", {"a": -1, "b": 1}),
    ("After increasing the counter by {a} and decreasing it by {b}, report what it holds.", {"a": 1, "b": -1}),
    ("A few customers came by this morning. Add {a:w} to the counter and confirm the new total.", {"a": 1}),
    ("Bump the counter once, and tell me what it says.", {ONE: 1}),
    ("Use increment_counter with {a}, use increment_counter with {b}, then call get_counter_value.", {"a": 1, "b": 1}),
    ("Give the counter {a} more and show me the value.", {"a": 1}),
    ("Grow the count by {a:w} and then by {b:w}. No need to explain; just say the total.", {"a": 1, "b": 1}),
    ("Do these steps:\n1) add {a}\n2) add {b}\n3) subtract {c}\n4) report the value", {"a": 1, "b": 1, "c": -1}),
    ("Decrement the counter by {a}, followed by a further decrement of {b}. What remains?", {"a": -1, "b": -1}),
    ("Add {a:w} and {b:w} to the counter.", {"a": 1, "b": 1}),
    ("Add {a} to the counter, and once you have added it, tell me the count.", {"a": 1}),
    ("Make 5 increments of {a} and read the counter.", {"a": 5}),
    ("Boost the counter by {a}; it is meant to be a big jump. Show the outcome.", {"a": 1}),
    ("Read the counter first, then add {a:w}, then read it again.", {"a": 1}),
    ("I'd like {a:w} added, then {b} added, then {c:w} removed. What's the value?", {"a": 1, "b": 1, "c": -1}),
    ("Drop the counter by {a:w} and get its value.", {"a": -1}),
    ("Advance the counter: {a}, then {b}, and lastly {c:w}. Print the total.", {"a": 1, "b": 1, "c": 1}),
    ("My colleague says the counter is too low. Increase it by {a}, and simply tell me the value.", {"a": 1}),
    ("Which value do you get when you add {a} and then add {b:w}?", {"a": 1, "b": 1}),
    ("Lower the counter by {a:w} three times. Display the count.", {"a": -3}),
    ("Add -{a} to the counter, then add {b}. Return the count.", {"a": -1, "b": 1}),
    ("Add {a:w} dozen to the counter and tell me the sum.", {"a": 12}),
    ("The counter has a start value that I forgot. Add {a} to it and tell me how many that makes.", {"a": 1}),
    ("First deduct {a}, second add {b:w}, third add {c:w}. Then look up the counter.", {"a": -1, "b": 1, "c": 1}),
    ("The counter was left alone overnight. Please just report the count as it is.", {}),
    (
        "Push the counter up by {a:w}, wait for the reply, push it up by {b:w}, and tell me the reading.",
        {"a": 1, "b": 1},
    ),
    (
        "Increment the counter by {a}, take off {b}, increment it by {c}, take off {d}. Final value?",
        {"a": 1, "b": -1, "c": 1, "d": -1},
    ),
    ("add {a} add {b} now what is it", {"a": 1, "b": 1}),
]


class Amount(int):
    """A number that a pattern can write in words: `{a:w}`."""

    def __format__(self, spec: str) -> str:
        return in_words(self) if spec == "w" else int.__format__(self, spec)


def in_words(number: int) -> str:
    """Return a number from 0 to 999 in English words."""
    hundreds, rest = divmod(number, 100)
    parts = [f"{SMALL[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        tens, units = divmod(rest, 10)
        parts.append(TENS[tens] + (f"-{SMALL[units]}" if units else ""))
    elif rest or not hundreds:
        parts.append(SMALL[rest])
    return " and ".join(parts)


def rows() -> Iterator[dict[str, Any]]:
    """Yield the rows, the same at every call."""
    rng = random.Random(SEED)  # noqa: S311
    for number, (pattern, counts) in enumerate(PATTERNS):
        amounts = {name: Amount(1 if name == ONE else _amount(rng)) for name in counts}
        initial = rng.choice([0, rng.randint(1, 9), rng.randint(10, 250), -rng.randint(1, 40)])
        yield {
            "id": f"counter-{number:02d}",
            "responses_create_params": {
                "input": [{"role": "user", "content": pattern.format_map(amounts)}],
                "tools": TOOLS,
                "parallel_tool_calls": number % 5 != 0,
            },
            "initial_count": initial,
            "expected_count": initial + sum(times * amounts[name] for name, times in counts.items()),
        }


def _amount(rng: random.Random) -> int:
    """Mostly small, sometimes large: 1 to 999."""
    return rng.choice([rng.randint(1, 12), rng.randint(1, 12), rng.randint(13, 99), rng.randint(100, 999)])


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the example rows of the counter environment.")
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
