"""Objects that Python's garbage collector need not look at."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def leave_alone() -> None:
    """Have the collector never look again at what lives now, which is what models' loading brought.

    A full collection goes through all of torch and transformers, 0.2 to 0.3 s in which nothing is decoded.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def importing_torch() -> Iterator[None]:
    """Have the collector neither run while torch is first imported nor look again at what this brings.

    It would go through a growing number of modules a dozen times before the first token.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
