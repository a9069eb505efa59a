"""The doctor: this machine, whether its kernels give a row the same bits in any company, and a pair's preflight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from specdec_cli.document import ResultDocument, computed
from specdec_cli.errors import ExitCode, RunError, SpecdecError, UsageError
from specdec_cli.libraries import untested_here
from specdec_cli.lm.invariance import InvarianceCheck, row_invariance
from specdec_cli.lm.kernels.kinds import kernels
from specdec_cli.lm.llama.native import missing, not_kept, remedy
from specdec_cli.measure.machine.machine import Machine, look
from specdec_cli.measure.machine.preflight import Preflight, preflight

if TYPE_CHECKING:
    from specdec_cli.recipe.schema import Recipe

NOT_CLAIMED = (
    "mixtures of experts in bfloat16 in transformers' forward: their grouped kernels are not tested for row invariance",
    "matrix products in a model's own classes in bfloat16, other than torch's linear product",
    "more than 64 rows in one forward: the row-invariance test ends there",
    "prompts that are recomputed after a sequence lost its cache",
    "float32, and any precision on a GPU: only equal tokens are promised there, which `specdec audit` checks",
)
"""The cases without a promise of bit-for-bit exactness until they are tested on this machine."""


@dataclass(frozen=True, slots=True)
class RowInvariance:
    """The row-invariance test of the CPU's kernels in bfloat16.

    Args:
        holds: whether every kernel that the bit-for-bit promise rests on passed; None where none was tested.
        checks: the kernels.
    """

    holds: bool | None = None
    checks: tuple[InvarianceCheck, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderState:
    """Whether our own decoder was compiled for this machine's CPU, and why not.

    Args:
        is_compiled: whether it runs here.
        obstacle: why it does not.
        remedy: what helps then.
    """

    is_compiled: bool
    obstacle: str | None
    remedy: str | None


class Diagnosis(ResultDocument):
    """The findings of doctor: this machine and, where one was named, a pair."""

    schema_name: ClassVar[str] = "specdec.doctor/1"

    machine: Machine
    row_invariance: RowInvariance
    decoder: DecoderState
    linear: dict[str, str] = Field(
        default_factory=kernels, description="What transformers' forward multiplies weights of a dtype with."
    )
    not_claimed: tuple[str, ...] = NOT_CLAIMED
    pair: Preflight | None
    warnings: list[str]

    @computed
    def verdict(self) -> Literal["ok", "incompatible", "cannot-run"]:
        """`ok`, or what an error makes of the pair: `incompatible` or `cannot-run`."""
        error = self.error()
        if error is None:
            return "ok"
        return "incompatible" if error.exit_code == ExitCode.USAGE else "cannot-run"

    def error(self) -> SpecdecError | None:
        """The pair's worst error, an incompatibility before all others; None without one."""
        errors = self.pair.errors if self.pair is not None else []
        worst = max(errors, key=lambda problem: problem.exit_code, default=None)
        if worst is None:
            return None
        kind = UsageError if worst.exit_code == ExitCode.USAGE else RunError
        return kind(worst.message, worst.hint)


def examine(recipe: Recipe | None = None, *, trust_remote_code: bool = False, tests_kernels: bool = True) -> Diagnosis:
    """Look at the machine, and at a recipe's pair without loading its weights.

    Args:
        recipe: names the pair; None looks at the machine alone.
        trust_remote_code: run Python code that comes with a configuration or a tokenizer.
        tests_kernels: run the row-invariance test, which computes: some seconds, and minutes on a busy machine.
    """
    machine = look()
    invariance = RowInvariance()
    if tests_kernels:
        checks = tuple(row_invariance(torch.bfloat16))
        invariance = RowInvariance(all(check.holds for check in checks if check.needed), checks)
    pair = preflight(recipe, machine, trust_remote_code=trust_remote_code) if recipe is not None else None
    warnings = [machine.busy] if machine.busy else []
    if (library := untested_here()) is not None:
        warnings.append(f"{library[0]}; `pip install '{library[1]}'` installs one that was")
    if invariance.holds is False:
        warnings.append(
            "a row's bits depend on the other rows in this machine's bfloat16 kernels: greedy output with a draft may "
            "differ from plain decoding at near-ties, as it may in float32"
        )
    target = None if pair is None else pair.target
    if target is not None and target.is_mixture_of_experts and not target.decoder.startswith("own"):
        warnings.append(
            "the target is a mixture of experts in transformers' forward: bit-for-bit equality is not promised; "
            "run `specdec audit`"
        )
    obstacle = missing()
    if not_kept() is not None:
        warnings.append(
            f"every run compiles our own decoder again, because it cannot be kept in {not_kept()}; name a folder that "
            "can be written with XDG_CACHE_HOME"
        )
    decoder = DecoderState(obstacle is None, obstacle, remedy(obstacle))
    return Diagnosis(machine=machine, row_invariance=invariance, decoder=decoder, pair=pair, warnings=warnings)
