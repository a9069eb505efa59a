"""What the commands' tests share."""

import gc

import pytest


@pytest.fixture(autouse=True)
def collected_again():
    """Measuring commands leave what lives out of collections; a process of many tests must not."""
    yield
    gc.unfreeze()
