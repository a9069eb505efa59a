"""P-EAGLE heads (arXiv 2602.01469): EAGLE-3 heads that were trained to go on from masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specdec_cli.lm.heads.eagle import Eagle3Head
from specdec_cli.lm.heads.eagle_files import HeadConfig

if TYPE_CHECKING:
    from specdec_cli.lm.door import LM


class PEagleHead(Eagle3Head):
    """EAGLE-3 whose further tokens come from masks: a mask token, and one state in the place of the target's."""

    def __init__(self, config: HeadConfig, target: LM) -> None:
        super().__init__(config, target)
        self.mask_token = config.mask_token
        self._mask = self.mix(self.weights["mask_hidden"].view(1, config.num_taps, -1))

    def recycled(self, output: Tensor) -> Tensor:
        """The mask's feature, whatever the output."""
        return self._mask.expand(len(output), -1)
