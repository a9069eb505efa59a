"""Grammars that cost too much, as strangers send them."""

import json
import string


def intersection(num_terms: int) -> str:
    """A terminal of a few hundred bytes whose automaton doubles with every term."""
    terms = (f"/(.*[a-{string.ascii_lowercase[1 + i % 24]}].{{{i}}})/" for i in range(num_terms))
    return f"start: T\nT: {' & '.join(terms)}"


PATTERNS = json.dumps(
    {"type": "object", "patternProperties": {f"^(a|b)*{i}$": {"type": "integer"} for i in range(500)}}
)
AMBIGUOUS = "start: s\ns: " + " | ".join("s " * num for num in range(2, 40)) + '| "a" | "b"\n'
