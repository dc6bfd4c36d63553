"""Write tasks of the `reasoning-gym` package as dataset rows.

    python create_dataset.py --list
    python create_dataset.py --dataset chain_sum --size 1000 --seed 1 --output train.jsonl
    python create_dataset.py --dataset chain_sum --config min_terms=3 --config max_terms=8 --output hard.jsonl
    python create_dataset.py --dataset chain_sum --dataset spell_backward --size 4 --seed 1 --output mixed.jsonl

The same arguments write the same file, with the same version of the package.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from nemo_gym.errors import NemoGymError, UsageError
from resources_servers.reasoning_gym.tasks import dataset_names, make_dataset, storable

INSTRUCTIONS = (
    "Solve the problem. You may think aloud first. Put nothing but the final answer between <answer> and </answer>."
)


def rows(name: str, *, size: int, seed: int, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one dataset.

    Args:
        name: The dataset's name.
        size: How many tasks.
        seed: Where its random numbers start.
        config: Further fields of its configuration.
    """
    dataset = make_dataset(name, {**config, "size": size, "seed": seed})
    for index in range(size):
        entry = storable(dataset, dataset[index])
        yield {
            "id": f"{name}-{seed}-{index}",
            "responses_create_params": {
                "input": [
                    {"role": "developer", "content": INSTRUCTIONS},
                    {"role": "user", "content": entry["question"]},
                ]
            },
            "dataset": {"name": name, "config": dict(config)},
            "entry": entry,
        }


def setting(text: str) -> tuple[str, Any]:
    """Read `key=value`, with the value as JSON where it is JSON, else as text."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"expected key=value, not '{text}'")
    try:
        return key, orjson.loads(value)
    except orjson.JSONDecodeError:
        return key, value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Write tasks of the reasoning-gym package as dataset rows.")
    parser.add_argument("--list", action="store_true", help="list the names of all datasets and stop")
    parser.add_argument("--dataset", action="append", default=[], metavar="NAME", help="may be given several times")
    parser.add_argument("--size", type=int, default=100, metavar="N", help="tasks per dataset (default: 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--config", action="append", type=setting, default=[], metavar="KEY=VALUE", help="a field of its configuration"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    return parser.parse_args(arguments)


def write(options: argparse.Namespace) -> None:
    """Do what the options ask for."""
    if options.list:
        sys.stdout.write("".join(f"{name}\n" for name in dataset_names()))
        return
    if not options.dataset or options.size < 1:
        raise UsageError("name at least one --dataset, and a --size of at least 1")
    config = dict(options.config)
    lines = [
        json.dumps(row, ensure_ascii=False) + "\n"
        for name in options.dataset
        for row in rows(name, size=options.size, seed=options.seed, config=config)
    ]
    if options.output is None:
        sys.stdout.writelines(lines)
    else:
        options.output.write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        write(parse(arguments))
    except NemoGymError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
