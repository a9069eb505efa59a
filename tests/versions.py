"""What older versions of transformers, which still are admitted, cannot do."""

import pytest
import transformers
from packaging.version import Version

TESTED = "5.23"
IS_OLDER = Version(transformers.__version__) < Version(TESTED)


def needs_transformers(why: str) -> pytest.MarkDecorator:
    """Skip a test beside a version older than the pinned one.

    Args:
        why: what older ones lack, as half a sentence.
    """
    return pytest.mark.skipif(IS_OLDER, reason=f"transformers before {TESTED} {why}")
