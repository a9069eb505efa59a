"""Structured output on the command line: what an output must match, from the recipe's `structured` to a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.files import given_path, read_text

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Structured
    from specdec_cli.sampling.grammar import Grammar
    from specdec_cli.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A constraint on the output, not compiled yet.

    Args:
        kind: of grammar, as compile_grammar takes it.
        source: the text of it.
    """

    kind: str
    source: str

    def compiled(self, tokenizer: Tokenizer) -> Grammar:
        """The grammar for a target's tokenizer.

        Raises:
            UsageError: it does not compile, or llguidance cannot read the tokenizer.
        """
        from specdec_cli.sampling.grammar import compile_grammar

        return compile_grammar(self.kind, self.source, tokenizer)


def wanted(section: Structured) -> GrammarSource | None:
    """The recipe's constraint, read from its file if it names one; None without a constraint.

    Raises:
        UsageError: a file that cannot be read, or llguidance is not installed.
    """
    if not section.is_given:
        return None
    from specdec_cli.sampling.grammar import check_installed

    check_installed()
    if section.regex is not None:
        return GrammarSource("regex", section.regex)
    if section.choice:
        return GrammarSource("choice", json.dumps(section.choice))
    schema = section.json_schema
    return GrammarSource("json_schema", _read(schema) if isinstance(schema, str) else json.dumps(schema))


def _read(path: str) -> str:
    return read_text(given_path(path), f"the JSON Schema `{path}`")
