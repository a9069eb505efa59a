"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): the modules in the target's own checkpoint guess."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.drafters.contract import Resources
from specdec_cli.drafters.heads import HeadDrafter
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM
    from specdec_cli.lm.heads.head_sequences import HeadSequences
    from specdec_cli.lm.heads.mtp_files import MtpModules

_READINGS = ("post-norm", "pre-norm")


@dataclass
class Drafter(HeadDrafter):
    """Guesses with the target's MTP modules, each for one further token; the last one goes on for all others.

    Args:
        recycle: which state a module hands on: `post-norm` (behind its norm, as modules are trained) or `pre-norm`
            (before it, as vLLM runs GLM-4.5).
    """

    recycle: str = "post-norm"
    taps = ("final",)

    def __post_init__(self) -> None:
        """Refuse another word."""
        super().__init__("the target's MTP modules")
        self.source: MtpModules | None = None  # the target's checkpoint, where it was read
        if self.recycle not in _READINGS:
            raise UsageError(f"`recycle` must be {' or '.join(_READINGS)}, not `{self.recycle}`")

    def load_sequences(self, resources: Resources, target: LM) -> HeadSequences:
        """The sequences of the modules, in order."""
        from specdec_cli.lm.heads.head_sequences import HeadSequences
        from specdec_cli.lm.heads.mtp import MtpHead
        from specdec_cli.lm.heads.mtp_files import read_mtp

        modules = self.source or read_mtp(target.name, target.origin.revision, resources.trust_remote_code)
        normed = self.recycle == "post-norm"
        heads = [MtpHead(modules, module, target, normed) for module in range(len(modules.tensors))]
        return HeadSequences(heads, target, self._name, len(self.taps))
