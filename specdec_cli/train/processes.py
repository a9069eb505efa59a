"""The processes of a training run, as accelerate starts them: each has a share of every batch; most runs have one.

Every process runs the same code. The main one alone writes files and speaks; the others speak only of errors that are
theirs alone.
"""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from specdec_cli.errors import RunError, SpecdecError, UsageError, in_words
from specdec_cli.quantities import counted
from specdec_cli.train.launcher import check_launcher

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

_LONGEST_WAIT = timedelta(days=2)  # for the main process while it evaluates, and for the slowest one
_SECONDS_FOR_THE_LAUNCHER = 20.0  # in which it ends the processes that are left when one has failed
_LOST = re.compile(r"gloo|nccl|connection (closed|reset)|broken pipe", re.IGNORECASE)


class EndedElsewhere(RunError):  # noqa: N818 - a state, of which this process says nothing
    """Another process has an error and says it; this one ends without a word."""

    def __init__(self) -> None:
        super().__init__("")


class Processes:
    """The processes of a run. A process that no launcher started is a run's only one.

    Args:
        device: that the target is asked to run on: auto, cpu, cuda or cuda:N.

    Attributes:
        accelerator: of accelerate, which connects the processes.
        num: how many there are.
        index: of this one, from 0.

    Raises:
        UsageError: the launcher's variables, its kind of parallelism or the device do not fit.
        RunError: the processes do not find each other.
    """

    def __init__(self, device: str = "auto") -> None:
        check_launcher()
        has_gpu = torch.cuda.is_available()
        self.accelerator = _connected(is_cpu=device == "cpu" or not has_gpu)
        self.num, self.index = int(self.accelerator.num_processes), int(self.accelerator.process_index)
        if has_gpu and self.accelerator.device.type == "cpu" and device.startswith("cuda"):
            message = f"accelerate uses CPUs, and the target is to run on `{device}`"
            raise UsageError(message, "say --device cpu, or start accelerate without --cpu")
        if self.num > 1:
            self._check_devices(device)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.index == 0

    def own_device(self, device: str) -> str:
        """The device that this process loads its target on: each of several has its own GPU."""
        its = self.accelerator.device
        if its.type == "cpu":
            return "cpu" if device == "auto" else device
        return str(its) if self.num > 1 else device

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of items: neighbours, as many as the others have, or one more."""
        return items[len(items) * self.index // self.num : len(items) * (self.index + 1) // self.num]

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes, without gradient; each gives one of the same shape."""
        total: Tensor = self.accelerator.reduce(tensor.detach(), "sum")
        return total

    def any(self, is_so: bool) -> bool:
        """Whether it is so in any process."""
        return bool(self.total(torch.tensor(float(is_so), device=self.accelerator.device)) > 0)

    def prepare(self, module: Any, optimizer: Any) -> tuple[Any, Any]:
        """A module, which lies on this process's device, and its optimizer, in accelerate's wrappers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # accelerate knows the option for buffers by its old name
            wrapped, optimizer = self.accelerator.prepare(module, optimizer, device_placement=[False, False])
        return wrapped, optimizer

    def joined(self, items: list[T]) -> list[T]:
        """The items of all processes in the order of the processes."""
        from accelerate.utils import gather_object

        joined: list[T] = gather_object(items)
        return joined

    def together(self, work: Callable[[], T]) -> T:
        """Do the work in all processes at once. If it fails in one, all of them end, and the first such one speaks."""
        return self._agreed(work)

    def each(self, work: Callable[[], T]) -> T:
        """Do the work in all processes, in the main one first: it may fill a cache that the others read."""
        first = self._agreed(work if self.is_main else _nothing)
        second = self._agreed(_nothing if self.is_main else work)
        return cast("T", first if self.is_main else second)

    def from_main(self, work: Callable[[], T]) -> T:
        """The result of work that the main process alone does."""
        from accelerate.utils import broadcast_object_list

        result = self._agreed(work if self.is_main else _nothing)
        return cast("T", broadcast_object_list([result])[0])

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Connect the processes for the body; errors name their process, if that is not the main one.

        Raises:
            RunError: another process has ended, and the launcher has not ended this one.
        """
        try:
            yield
            self._disconnect()
        except Exception as error:
            if self.num == 1 or isinstance(error, EndedElsewhere):
                raise
            if not isinstance(error, SpecdecError) and _LOST.search(str(error)):
                sleep(_SECONDS_FOR_THE_LAUNCHER)
                message = "another process of the run has ended, or cannot be reached"
                raise RunError(message, "its own message says why; continue with --resume") from error
            if self.is_main:
                raise
            raise self._named(error) from error

    def _disconnect(self) -> None:
        """End the processes' group while the interpreter is whole.

        A module that was prepared keeps the group, and its threads abort an interpreter that ends
        (pytorch/pytorch#179291).
        """
        self.accelerator.free_memory()
        gc.collect()
        self.accelerator.end_training()

    def _agreed(self, work: Callable[[], T]) -> T:
        """The result of work, once it has failed in no process."""
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            error = raised
        has_failed = self.joined([error is not None])
        if error is not None and has_failed.index(True) == self.index:
            raise error
        if any(has_failed):
            raise EndedElsewhere
        return cast("T", result)

    def _named(self, error: Exception) -> RunError:
        message, hint, code = in_words(error)
        named = RunError(f"process {self.index + 1} of {self.num}: {message}", hint)
        named.exit_code = code
        return named

    def _check_devices(self, device: str) -> None:
        from accelerate import DistributedType

        kind = self.accelerator.distributed_type
        if kind not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
            message = f"accelerate is configured for {kind.value}, and train-draft gives each process a whole copy"
            raise UsageError(message, "start it with `accelerate launch --multi_gpu`")
        if self.accelerator.device.type == "cpu":
            return
        if ":" in device:
            raise UsageError(f"`{device}` is one GPU, and each process needs its own", "say --device cuda")
        here, num = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > num:
            message = f"{here} processes were started on a machine with {counted(num, 'GPU')}"
            raise UsageError(message, f"start no more than {num} on it")


def _nothing() -> None:
    """The share of a process that only waits for the others."""


def _connected(is_cpu: bool) -> Accelerator:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    # Buffers are constants. A language model may have weights that a batch leaves alone; and without the search for
    # these, gradients would lie in other buckets from the second step on: a continued run would add them in another
    # order than one that was never stopped.
    parallel = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
    try:
        accelerator = Accelerator(cpu=is_cpu, kwargs_handlers=[parallel, InitProcessGroupKwargs(timeout=_LONGEST_WAIT)])
    except (RuntimeError, ValueError) as error:
        message = f"the processes cannot be connected: {str(error).strip().splitlines()[0]}"
        raise RunError(message, "start all of them with `accelerate launch`") from error
    _save_bare_weights(accelerator)
    return accelerator


def _save_bare_weights(accelerator: Accelerator) -> None:
    """Let checkpoints name weights without the wrapper of several processes, so that any number of them reads these."""

    def save(models: list[Any], weights: list[Any], _folder: str) -> None:
        weights[:] = [accelerator.unwrap_model(model).state_dict() for model in models]

    def load(models: list[Any], _folder: str) -> None:
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
