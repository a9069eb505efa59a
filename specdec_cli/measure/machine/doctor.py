"""The doctor: this machine, whether its kernels give a row the same bits in any company, and a pair's preflight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

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
class Diagnosis:
    """The findings of doctor.

    Args:
        machine: versions, devices, load.
        invariance: the CPU kernels' row-invariance test in bfloat16; None where it was not run.
        pair: the preflight; None where no pair was named.
        warnings: sentences about the machine.
        linear: what transformers' forward multiplies bfloat16 and int8 weights with.
        decoder_obstacle: why our own decoder does not run on this machine; None where it does.
        decoder_remedy: what helps then.
    """

    machine: Machine
    invariance: tuple[InvarianceCheck, ...] | None
    pair: Preflight | None
    warnings: tuple[str, ...]
    linear: Mapping[str, str] = field(default_factory=kernels)
    decoder_obstacle: str | None = None
    decoder_remedy: str | None = None

    @property
    def is_row_invariant(self) -> bool | None:
        """Whether every kernel that the bit-for-bit promise rests on passed; None where none was tested."""
        return None if self.invariance is None else all(check.holds for check in self.invariance if check.needed)

    @property
    def verdict(self) -> str:
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

    def as_dict(self) -> dict[str, Any]:
        """The JSON form of `specdec.doctor/1`."""
        return {
            "machine": self.machine.as_dict(),
            "row_invariance": {
                "holds": self.is_row_invariant,
                "checks": [asdict(check) | {"holds": check.holds} for check in self.invariance or ()],
            },
            "decoder": {
                "is_compiled": self.decoder_obstacle is None,
                "obstacle": self.decoder_obstacle,
                "remedy": self.decoder_remedy,
            },
            "linear": dict(self.linear),
            "not_claimed": list(NOT_CLAIMED),
            "pair": self.pair.as_dict() if self.pair is not None else None,
            "warnings": list(self.warnings),
            "verdict": self.verdict,
        }


def examine(recipe: Recipe | None = None, *, trust_remote_code: bool = False, tests_kernels: bool = True) -> Diagnosis:
    """Look at the machine, and at a recipe's pair without loading its weights.

    Args:
        recipe: names the pair; None looks at the machine alone.
        trust_remote_code: run Python code that comes with a configuration or a tokenizer.
        tests_kernels: run the row-invariance test, which computes: some seconds, and minutes on a busy machine.
    """
    machine = look()
    invariance = tuple(row_invariance(torch.bfloat16)) if tests_kernels else None
    pair = preflight(recipe, machine, trust_remote_code=trust_remote_code) if recipe is not None else None
    warnings = [machine.busy] if machine.busy else []
    if (library := untested_here()) is not None:
        warnings.append(f"{library[0]}; `pip install '{library[1]}'` installs one that was")
    if any(not check.holds for check in invariance or () if check.needed):
        warnings.append(
            "a row's bits depend on the other rows in this machine's bfloat16 kernels: greedy output with a draft may "
            "differ from plain decoding at near-ties, as it may in float32"
        )
    target = None if pair is None else pair.target
    if target is not None and target.is_mixture_of_experts and target.decoder != "own":
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
    return Diagnosis(
        machine, invariance, pair, tuple(warnings), decoder_obstacle=obstacle, decoder_remedy=remedy(obstacle)
    )
