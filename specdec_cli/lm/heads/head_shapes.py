"""The tensors that a published head must have, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.lm.heads.published import PublishedDraft

_HINT = "choose a draft that was made for this target, or `--draft ngram`"


def check_shapes(config: PublishedDraft, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """See that all tensors that a head needs are there and fit, and no others.

    Args:
        config: the head's.
        shapes: of its tensors, by common names.

    Raises:
        UsageError: one is missing or has another shape,
            or there is one that such a head has not.
    """
    wanted = config.shapes()
    for name, shape in wanted.items():
        found = shapes.get(name.rstrip("?"))
        if found is None and not name.endswith("?"):
            raise UsageError(f"the draft head `{config.name}` lacks the tensor `{name}`", "copy or download it again")
        if found is not None and found != shape:
            said = f"the tensor `{name.rstrip('?')}` of `{config.name}` has the shape {_shape(found)}"
            raise UsageError(f"{said}, where {_shape(shape)} is expected", "copy or download the draft again")
    known = {name.rstrip("?") for name in wanted}
    strange = next((name for name in shapes if name not in known and config.reads(name)), None)
    if strange is not None:
        raise UsageError(f"the draft head `{config.name}` has a tensor `{strange}`, which is not supported", _HINT)


def _shape(shape: Any) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"
