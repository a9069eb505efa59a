"""What older versions of transformers, which still are admitted, cannot do."""

import pytest
import transformers
from packaging.version import Version

TESTED = "5.23"


def needs_transformers(why: str) -> pytest.MarkDecorator:
    """Skip a test beside a version older than the pinned one.

    Args:
        why: what older ones lack, as half a sentence.
    """
    is_older = Version(transformers.__version__) < Version(TESTED)
    return pytest.mark.skipif(is_older, reason=f"transformers before {TESTED} {why}")
