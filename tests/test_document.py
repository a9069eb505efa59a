"""JSON documents: their keys by the schema, and parts that are measured objects."""

import math

from specdec_cli.document import Interval, as_json
from specdec_cli.measure.documents.bench import BenchDocument
from specdec_cli.measure.documents.recipes import PlanDocument


def test_every_key_that_is_always_written_is_required() -> None:
    schema = BenchDocument.json_schema()
    assert {*schema["properties"]} - {*schema["required"]} == {"engine"}, "which is absent where specdec decoded"
    assert {"chat", "resumed"} <= {*schema["$defs"]["PassesPlan"]["required"]}
    assert "k_max" not in PlanDocument.json_schema()["required"], "each command has keys of its own"


def test_a_figure_that_does_not_exist_is_null() -> None:
    assert as_json(Interval(math.nan, (math.nan, 1.0), 3)) == {"median": None, "ci95": None, "pairs": 3}
    assert as_json(Interval(1.5, (1.0, 2.0), 3)) == {"median": 1.5, "ci95": [1.0, 2.0], "pairs": 3}


def test_49_times_are_not_negative() -> None:
    objects = BenchDocument.json_schema()["$defs"].values()
    found = [made["properties"]["timing"]["properties"] for made in objects if "timing" in made.get("properties", {})]
    assert len(found) == 2
    for times in found:
        assert [one["anyOf"][0] for one in times.values()] == [{"type": "number", "minimum": 0}] * 4
