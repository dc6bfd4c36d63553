"""Reading English instructions: tokens, numbers in digits and in words, stems, clauses.

Everything here is general vocabulary of the language; nothing knows of tools or of any dataset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, Literal

_SMALL: Final = {
    word: value
    for value, word in enumerate(
        [
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
    )
}
_TENS: Final = {
    word: value
    for value, word in zip(
        range(20, 100, 10), ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], strict=True
    )
}
_SCALES: Final = {"thousand": 1_000, "million": 1_000_000}
_NUMBER_WORDS: Final = frozenset({*_SMALL, *_TENS, *_SCALES, "hundred", "dozen"})
_PRONOUN_ONE_AFTER: Final = frozenset({"this", "that", "each", "every", "no", "last", "which", "any"})
_SIGNS: Final = frozenset({"minus", "negative"})

_IDIOMS: Final = re.compile(
    r"\bone (?:by one|at a time|after (?:another|the other)|step at a time|more time)\b|\ball at once\b|\bat once\b",
    re.IGNORECASE,
)
_TOKEN: Final = re.compile(
    r"""
      (?P<quote>"[^"]*" | “[^”]*” | (?<!\w)'[^']+'(?!\w) | `[^`]*`)
    | (?P<number>(?<![\w.])[-+\u2212]?\d+(?:,\d{3})*(?:\.\d+)?(?!\w))
    | (?P<word>(?:St|Mt|Ft)\.(?=\s[A-Z]) | \w+(?:['-]\w+)*)
    | (?P<sign>[-%*/^=\u00d7\u2212])
    | (?P<mark>[.,;:!?()\n\u2013\u2014])
    """,
    re.VERBOSE,
)
_ENUMERATION: Final = re.compile(r"^\s*(?:\d{1,2}[.)]|[-*\u2022])(?=\s)", re.MULTILINE)
_CONNECTORS: Final = frozenset(
    {"and", "then", "before", "after", "afterwards", "finally", "next", "once", "when", "but", "followed", "until"}
)
_SENTENCE_MARKS: Final = frozenset({".", "!", "?", "\n"})
_STEMS_KEPT: Final = 4096


@dataclass(frozen=True)
class Token:
    """A piece of an instruction.

    Args:
        kind: What it is.
        text: The text as written; a quotation without its quotes.
        value: The value of a number.
        opens: Whether a sentence begins with it.
    """

    kind: Literal["word", "number", "quote", "mark"]
    text: str
    value: int | float | None = None
    opens: bool = False

    @property
    def word(self) -> str:
        """The text in lower case; empty unless it is a word."""
        return self.text.lower() if self.kind == "word" else ""


@dataclass(frozen=True)
class Clause:
    """A part of an instruction between marks or connecting words.

    Args:
        tokens: The words, numbers and quotations.
        connector: The connecting word before it ("and", "after", ...), or "".
        mark: The punctuation mark before it, or "".
        leads: Whether its connecting word opens a sentence, or half of one: "Once ...", "and once ...".
    """

    tokens: tuple[Token, ...]
    connector: str = ""
    mark: str = ""
    leads: bool = False

    @cached_property
    def words(self) -> list[str]:
        """The words in lower case, in order."""
        return [token.word for token in self.tokens if token.kind == "word"]

    @cached_property
    def stems(self) -> set[str]:
        """The stems of the words."""
        return {stem(word) for word in self.words}


@lru_cache(_STEMS_KEPT)
def stem(word: str) -> str:
    """Return what is left of a lower-case word without its inflection: `adds`, `added`, `adding` are one."""
    word = word.removesuffix("'s").strip("'")
    for suffix in ("ing", "ed", "es", "s"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word.removesuffix(suffix)
            break
    if len(word) > 3 and word[-1] == word[-2]:
        word = word[:-1]
    return word.removesuffix("e") if len(word) > 3 else word


def stems(words: str) -> frozenset[str]:
    """Return the stems of the words in a text."""
    return frozenset(stem(word) for word in words.split())


def tokenize(text: str) -> list[Token]:
    """Return the tokens of `text`, with number words read as numbers."""
    text = _ENUMERATION.sub(" ", text.replace("\u2019", "'"))
    tokens: list[Token] = []
    opens = True
    for match in _TOKEN.finditer(_IDIOMS.sub(" ", text)):
        kind, piece = match.lastgroup, match.group()
        if kind == "quote":
            tokens.append(Token("quote", piece[1:-1]))
        elif kind == "number":
            tokens.append(Token("number", piece, _digits(piece)))
        elif kind == "mark":
            tokens.append(Token("mark", piece))
        elif kind == "sign":
            tokens.append(Token("word", piece))
        else:
            tokens.extend(Token("word", part, opens=opens and not at) for at, part in enumerate(_parts(piece)))
        opens = kind == "mark" and (piece in _SENTENCE_MARKS or piece == ":")
    return _with_signs(_with_number_words(tokens))


def clauses(tokens: Sequence[Token]) -> list[Clause]:
    """Split tokens into clauses and put them in the order in which they are to be done.

    `X after Y` and `X once Y` are Y, then X; `Before X, Y` is Y, then X.
    """
    found: list[Clause] = []
    current: list[Token] = []
    connector = mark = ""
    leads = True

    def finish() -> None:
        nonlocal connector, mark, leads
        if current:
            found.append(Clause(tuple(current), connector, mark, leads))
            current.clear()
            connector, mark, leads = "", "", False

    for token in tokens:
        if token.kind == "mark":
            finish()
            connector, mark, leads = "", token.text, token.text in _SENTENCE_MARKS
        elif token.word in _CONNECTORS:
            finish()
            leads = leads or bool(connector)
            connector = token.word
        else:
            current.append(token)
    finish()
    return _in_order(found)


def _in_order(found: list[Clause]) -> list[Clause]:
    """Reorder within sentences; a clause that carries on a list ("3, 4 and 5") stays with the one before it."""
    groups: list[list[Clause]] = []
    for clause in found:
        carries_on = bool(groups) and not any(token.kind == "word" for token in clause.tokens)
        if carries_on and clause.mark in ("", ","):
            groups[-1].append(clause)
        else:
            groups.append([clause])
    at = 0
    while at < len(groups):
        head = groups[at][0]
        refers_back = bool(head.words) and head.words[0] in ("that", "this", "which", "that's")
        if head.connector in ("after", "once", "when") and not head.leads and not refers_back:
            groups.insert(_sentence_end(groups, at), groups[at - 1])
            del groups[at - 1]
        elif head.connector == "before" and head.leads and at + 1 < len(groups):
            groups[at], groups[at + 1] = groups[at + 1], groups[at]
            at += 1
        at += 1
    return [clause for group in groups for clause in group]


def _sentence_end(groups: list[list[Clause]], start: int) -> int:
    """Return where in `groups` the sentence of `groups[start]` ends."""
    for at in range(start + 1, len(groups)):
        if groups[at][0].mark in _SENTENCE_MARKS:
            return at
    return len(groups)


def _parts(word: str) -> list[str]:
    """Split `twenty-one` but keep `well-known` and `what's`."""
    parts = word.split("-")
    return parts if all(part.lower() in _NUMBER_WORDS for part in parts) else [word]


def _digits(text: str) -> int | float:
    plain = text.replace("\u2212", "-").replace(",", "")
    return float(plain) if "." in plain else int(plain)


def _with_number_words(tokens: list[Token]) -> list[Token]:
    result: list[Token] = []
    at = 0
    while at < len(tokens):
        length, value = _number_at(tokens, at)
        if length:
            text = " ".join(token.text for token in tokens[at : at + length])
            result.append(Token("number", text, value))
            at += length
        else:
            result.append(tokens[at])
            at += 1
    return result


def _number_at(tokens: list[Token], start: int) -> tuple[int, int]:
    """Return how many tokens from `start` spell a number, and its value; (0, 0) where none does."""
    words = [token.word for token in tokens[start : start + 12]]
    if words[:3] == ["half", "a", "dozen"]:
        return 3, 6
    if words[0] == "one" and start and tokens[start - 1].word in _PRONOUN_ONE_AFTER:
        return 0, 0
    total = group = length = 0
    last = ""
    if words[0] in ("a", "an") and words[1:2] and words[1] in ("hundred", "dozen", *_SCALES):
        group, length, last = 1, 1, "small"
    for at, word in enumerate(words[length:], start=length):
        if word in _SMALL and last in ("", "hundred", "scale", "tens") and not (last == "tens" and _SMALL[word] > 9):
            group, last = group + _SMALL[word], "small"
        elif word in _TENS and last in ("", "hundred", "scale"):
            group, last = group + _TENS[word], "tens"
        elif word == "hundred" and last in ("small", "tens"):
            group, last = group * 100, "hundred"
        elif word in _SCALES and last:
            total, group, last = total + group * _SCALES[word], 0, "scale"
        elif word == "dozen" and last == "small":
            return at + 1, total + group * 12
        elif word == "and" and last in ("hundred", "scale") and {*words[at + 1 : at + 2]} & {*_SMALL, *_TENS}:
            continue
        else:
            break
        length = at + 1
    return length, total + group


def _with_signs(tokens: list[Token]) -> list[Token]:
    result: list[Token] = []
    for token in tokens:
        if token.kind == "number" and result and result[-1].word in _SIGNS and token.value is not None:
            result[-1] = replace(token, text=f"{result[-1].text} {token.text}", value=-token.value)
        else:
            result.append(token)
    return result
