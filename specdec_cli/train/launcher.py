"""The variables by which `accelerate launch`, torchrun or mpirun tell a process which one of several it is."""

from __future__ import annotations

import os

from specdec_cli.errors import UsageError

_HINT = "start all processes with `accelerate launch`, or unset the variable"
_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def launched_index() -> int:
    """Which one of several processes this is, from 0; 0 without a launcher."""
    ranks = (os.environ.get(name, "") for name in _RANKS)
    return next((int(rank) for rank in ranks if rank.isdecimal()), 0)


def hush_torch() -> None:
    """Let torch's C++ code report errors alone in a launched process, unless the user has asked for more.

    It warns that no weight is left unused. torch must not be imported yet.
    """
    if "WORLD_SIZE" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def check_launcher() -> None:
    """Check the variables, before anything waits for other processes.

    Raises:
        UsageError: they are no numbers, some are missing, or the launcher started fewer processes than it was asked.
    """
    for name in _NUMBERS:
        value = os.environ.get(name)
        if value is not None and not value.isdecimal():
            raise UsageError(f"the environment variable `{name}` is `{value}`, which is no number", _HINT)
    if any(name in os.environ for name in _MPI_SIZES):
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and missing:
        raise UsageError(f"the environment variable `WORLD_SIZE` is set without `{missing[0]}`", _HINT)
    if {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ:
        message = "`accelerate launch --cpu` starts one process, however many it is asked for"
        raise UsageError(message, "write --multi_gpu instead of --cpu: processes without a GPU train on CPUs")
