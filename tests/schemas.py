"""Documents that commands write, against the schemas that they are published with."""

import functools
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

from specdec_cli.document import ResultDocument


@functools.cache
def _validator(kind: type[ResultDocument]) -> Draft202012Validator:
    schema = kind.json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, format_checker=FormatChecker())


def assert_fits(found: Any, kind: type[ResultDocument]) -> None:
    """Fail with a ValidationError where a document is not of its kind."""
    _validator(kind).validate(found)
