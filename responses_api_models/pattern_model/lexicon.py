"""The words the policy knows, as stems (see `reading.stem`) or as plain lower-case words."""

from __future__ import annotations

from typing import Final

from responses_api_models.pattern_model.reading import stems

RAISE: Final = stems("increment increase add raise bump grow plus up advance boost lift tick put climb higher insert")
LOWER: Final = stems("decrement decrease subtract reduce lower drop deduct down away off remove withdraw shrink cut")
READ: Final = stems(
    "get read tell report show see check look what what's which return display find fetch know say state print "
    "much many give confirm share answer where reveal announce output query view inspect list how's"
)
"""Verbs (and question words) by sense; a tool has the sense of the first known word of its name."""

WEAK_RAISE: Final = stems("more extra another further")
WEAK_LOWER: Final = stems("fewer less back")
"""Words that give an amount its direction where no verb does: "5 more", "then 2 less"."""

BY_ONE: Final = stems("increment decrement bump tick")
"""Verbs that mean "by one" where no amount is said."""

STATES: Final = stems("is was be stand sit start begin hold currently initial initially already now at has contain")
"""Words of clauses that say how things are ("the counter stands at 10")."""

UNSUPPORTED: Final = stems(
    "reset clear double triple halve multiply divide square undo swap negate half quarter average percent "
    "- \u2212 % * / ^ = \u00d7"
)
"""Verbs and signs the policy can't follow, unless a tool is named so."""

REFUSED: Final = frozenset(
    {
        *("if", "unless", "except", "without", "instead", "rather", "or", "between", "per"),
        *("not", "don't", "never", "neither", "nor", "oops", "sorry", "actually"),
    }
)
"""Words that change what a clause asks for in ways the policy does not follow."""

LIST_WORDS: Final = stems("time times twice thrice once again last lastly second third final still number amount same")
"""Words that may stand beside an amount in a clause that carries on from the one before: "then another 3"."""

FILLERS: Final = stems(
    "a an the i i'd i'll i'm me my we us our you your it its this that these those please could can would should will "
    "do does did is are was be been to in for at of on with by about like need want let and or so now today tomorrow "
    "tonight right currently there here hey hi hello thanks thank just also first last any some how what what's "
    "where when who why which tell show give get check find know look up out next week weekend morning evening"
)
"""Common words that are never a name, however they are written."""
