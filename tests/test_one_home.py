"""A fact has one home: a planted entry in its table appears in everything that is made from the table."""

import subprocess
import sys

RULE = """
from dataclasses import replace
from specdec_cli import verification
verification.RULES["planted"] = replace(verification.RULES["exact-match"], meaning="planted words")
verification.RULES["planted-lossy"] = replace(verification.RULES["typical"])

from typing import get_args
from specdec_cli.recipe.keys import describe
from specdec_cli.recipe.schema import Recipe, Sampling, Speculation
from specdec_cli.recipe.values import Verify
assert "planted" in get_args(Verify) and "planted" in describe("speculation.verify")
recipe = Recipe(speculation=Speculation(verify="planted"), sampling=Sampling(temperature=0.9))
from specdec_cli.engine.options import EngineOptions
EngineOptions(verify="planted")
from specdec_cli.engine.promise import Promise
assert Promise.of(recipe) == Promise("planted", is_lossless=True)
from specdec_cli.cli.audit import _modes_of
assert _modes_of("planted") == ("greedy", "sampled")
from specdec_cli.export.settings import ExportSettings
assert ExportSettings(recipe, {}, "vLLM").lossless_rule()
lossy = ExportSettings(Recipe(speculation=Speculation(verify="planted-lossy")), {"speculation.verify": "flag"}, "vLLM")
assert not lossy.lossless_rule() and "planted-lossy" in lossy.warnings[0], lossy.warnings
from specdec_cli.measure.audit.audit import DRAWN_MODES, TREE_MODES
assert "planted" in TREE_MODES and "planted-lossy" not in (*DRAWN_MODES, *TREE_MODES)
from specdec_cli.report.acceptance import _MEANINGS
assert _MEANINGS["planted"] == "planted words"
from specdec_cli.measure.predict.starts import check_knowable
from specdec_cli.errors import UsageError
try:
    check_knowable("planted")
except UsageError as error:
    assert "cannot replay the rule `planted`" in error.message
"""


def test_a_new_rule_of_verification_is_one_entry() -> None:
    """Recipe, help, engine, promise, audit, exports and traces ask the table."""
    subprocess.run([sys.executable, "-c", RULE], check=True, timeout=120)


SETTING = """
from pydantic import Field
from specdec_cli.recipe import schema

class Serve(schema.Serve):
    max_planted_words: int = Field(7, ge=1, le=9, description="Maximum number of planted words.")

schema.Recipe.model_fields["serve"].annotation = Serve
from specdec_cli.cli.options import SERVE_OPTIONS
[option] = [one for one in SERVE_OPTIONS if one.path == "serve.max_planted_words"]
assert (option.flag, option.kind, option.value_name, option.default_words) == ("--max-planted-words", int, "N", "7")
assert option.declared(False).annotation.__metadata__[0].help == "Maximum number of planted words."
from specdec_cli.recipe.aliases import meant_key
assert "max_planted_words" in meant_key("serve", "max_plantd_words", list(Serve.model_fields))
from specdec_cli.recipe.layers import from_environment
[given], problems = from_environment({"SPECDEC_SERVE_MAX_PLANTED_WORDS": "8"}, ())
assert (given.path, given.value, problems) == (("serve", "max_planted_words"), 8, [])
"""


def test_a_new_setting_is_one_field() -> None:
    """Option, help, default, environment variable and documentation follow from the schema."""
    subprocess.run([sys.executable, "-c", SETTING], check=True, timeout=120)
