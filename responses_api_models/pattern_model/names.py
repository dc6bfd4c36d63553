"""Names in a clause: the place in "the weather in New York", the person in "a letter for Ada"."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from responses_api_models.pattern_model.lexicon import FILLERS
from responses_api_models.pattern_model.reading import Clause, Token, stem

_PREPOSITIONS: Final = frozenset({"in", "for", "at", "near", "around", "of", "over", "to"})
_PARTICLES: Final = frozenset(
    ["de", "la", "del", "da", "do", "di", "du", "of", "the", "am", "upon", "en", "el", "san", "al"]
)


def name_in(clause: Clause, known: AbstractSet[str], *, alone: bool) -> str | None:
    """Return the name that a clause speaks of, or None.

    Capital letters mark a name, except where a sentence begins; after a preposition small letters will do.

    Args:
        clause: The clause.
        known: Stems of words that are no names here, such as those of the tool's own name.
        alone: Whether the clause carries on a list, so that a name may be all it holds.
    """
    tokens = clause.tokens
    capitals = [at for at in range(len(tokens)) if _is_capital(tokens[at], known)]
    after_preposition = [at for at in capitals if at and tokens[at - 1].word in _PREPOSITIONS]
    inside = [at for at in capitals if not tokens[at].opens or "'" in tokens[at].word]
    if any(_is_within_another(tokens, at, known) for at in capitals):
        return None
    for starts in (after_preposition, inside):
        if starts:
            return _run(tokens, starts[0], capital=True, known=known)
    for at in range(1, len(tokens)):
        if tokens[at - 1].word in _PREPOSITIONS and _may_be_name(tokens[at], known):
            return _run(tokens, at, capital=False, known=known)
    if capitals:
        return _run(tokens, capitals[0], capital=True, known=known)
    if alone and tokens and all(_may_be_name(token, known) for token in tokens):
        return _run(tokens, 0, capital=False, known=known)
    return None


def _is_within_another(tokens: tuple[Token, ...], at: int, known: AbstractSet[str]) -> bool:
    """Whether the name at `at` only tells of something else: "the capital of France"."""
    return at > 1 and tokens[at - 1].word == "of" and stem(tokens[at - 2].word) not in known | FILLERS


def _may_be_name(token: Token, known: AbstractSet[str]) -> bool:
    return token.kind == "word" and stem(token.word) not in FILLERS | known


def _is_capital(token: Token, known: AbstractSet[str]) -> bool:
    return token.text[:1].isupper() and _may_be_name(token, known)


def _run(tokens: tuple[Token, ...], start: int, *, capital: bool, known: AbstractSet[str]) -> str:
    """Return the words from `start` that belong to one name, without a possessive ending."""
    belongs = _is_capital if capital else _may_be_name
    words = [tokens[start].text]
    at = start + 1
    while at < len(tokens) and not words[-1].endswith("'s"):
        particles = 0
        while at + particles < len(tokens) and tokens[at + particles].word in _PARTICLES:
            particles += 1
        follows = at + particles
        if follows >= len(tokens) or not belongs(tokens[follows], known):
            break
        words.extend(token.text for token in tokens[at : follows + 1])
        at = follows + 1
    return " ".join(words).removesuffix("'s")
