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


_COMPILE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A constraint on the output, not compiled yet."""

    kind: str
    source: str

    def compiled(self, tokenizer: Tokenizer) -> Grammar:
        """The grammar for a target's tokenizer.

        Raises:
            UsageError: it does not compile, takes more than two minutes or half of the free memory for that, or
                llguidance cannot read the tokenizer.
        """
        import torch

        from specdec_cli.lm.machine.device_memory import device_memory
        from specdec_cli.sampling.grammar_sandbox import GrammarCompiler, GrammarLimits

        limits = GrammarLimits(_COMPILE_SECONDS, device_memory(torch.device("cpu")).free_bytes // 2)
        return GrammarCompiler(limits).compile(self.kind, self.source, tokenizer)


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
    return GrammarSource("json_schema", schema_text(schema) if isinstance(schema, str) else json.dumps(schema))


def schema_text(schema: str) -> str:
    """A JSON Schema that is given as text, or as the path of its file.

    Raises:
        UsageError: a file that cannot be read.
    """
    is_text = schema.lstrip().startswith("{") or schema.strip() in ("true", "false")
    return schema if is_text else read_text(given_path(schema), f"the JSON Schema `{schema}`")
