"""Being here puts this folder on the path, so that tests in subfolders import its models and toys.

One thread, in child processes too: on models this small a second one only waits, and a busy machine makes it wait long.
Without a GPU Triton's kernels run in its interpreter, which has to be said before it is imported.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """A machine on which nothing else runs: what a measuring command finds depends on no load."""
    from specdec_cli.measure.machine import interruption
    from specdec_cli.measure.machine.interruption import Usage

    monkeypatch.setattr(interruption, "look_at_usage", lambda: Usage(0.0, 0.0, 0.0, 0))
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
