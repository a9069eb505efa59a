"""The target as training sees it: the loaded model behind its door, its configuration, and its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec_cli.lm.door import LM
from specdec_cli.lm.files.checkpoint import clear_errors
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.settings import ModelSettings

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_NUM_PIECES, _BYTES = 64, 4096
_UNITS = 256  # vectors that the output layer reads at once: of a large vocabulary, a few hundred megabytes of logits


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    """A loaded target.

    Args:
        lm: the model.
        folder: with its files.
        config: transformers' configuration of its language model.
        trust_remote_code: run Python code that comes with it.
    """

    lm: LM
    folder: Path
    config: Any
    trust_remote_code: bool = False

    @classmethod
    def of(cls, lm: LM, revision: str | None = None, trust_remote_code: bool = False) -> TrainingTarget:
        """The target of a loaded model.

        Raises:
            RunError: its configuration cannot be read.
        """
        settings = ModelSettings(revision)
        plan = ModelPlan(lm.name, settings, trust_remote_code=trust_remote_code, fetches_weights=False)
        with quiet(), clear_errors(lm.name):
            return cls(lm, plan.folder, plan.config.get_text_config(), trust_remote_code)

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        return self.lm.device

    @property
    def weights_identity(self) -> str:
        """SHA-256, in hexadecimal, of the names and sizes of its files of weights and of pieces of what they hold."""
        paths = [self.folder] if self.folder.is_file() else sorted(self.folder.iterdir())
        digest = hashlib.sha256()
        for path in paths:
            if path.suffix in _WEIGHTS:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                for piece in _pieces(path):
                    digest.update(piece)
        return digest.hexdigest()

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return int(self.config.num_hidden_layers)

    def layer_keys(self, intermediate_size: int | None) -> dict[str, Any]:
        """Keys of a transformers configuration whose layers have the target's shape, whatever its family."""
        config, hidden = self.config, self.hidden_size
        heads = int(config.num_attention_heads)
        rope = dict(getattr(config, "rope_parameters", None) or {})
        return {
            "hidden_size": hidden,
            "intermediate_size": intermediate_size or int(getattr(config, "intermediate_size", 4 * hidden)),
            "num_attention_heads": heads,
            "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
            "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
            "max_position_embeddings": self.lm.max_context,
            "vocab_size": self.lm.vocab_size,
            "rms_norm_eps": float(getattr(config, "rms_norm_eps", 1e-6)),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
            "hidden_act": "silu",
        }

    def embedding(self) -> Tensor:
        """Input embeddings [V, hidden] float32."""
        with torch.no_grad():
            return self.lm.embed(range(self.lm.vocab_size)).float().clone()

    def output_layer(self, ids: Tensor | None = None) -> Tensor:
        """The weights [V, hidden] float32 of its output layer, as far as that is linear: its logits of unit vectors.

        Args:
            ids: tokens [D] int64 whose rows are wanted; None wants all.
        """
        ids = torch.arange(self.lm.vocab_size) if ids is None else ids
        return OutputLayer.of(self, ids).weight


class OutputLayer:
    """The target's output layer for some tokens alone.

    Args:
        ids: the tokens [D] int64.
        weight: [D, hidden] float32.
        bias: [D] float32.
        lm: the target where the layer is not linear, because it caps its logits; else None.
    """

    def __init__(self, ids: Tensor, weight: Tensor, bias: Tensor, lm: LM | None) -> None:
        self.ids, self.weight, self._bias, self._lm = ids, weight, bias, lm

    @classmethod
    def of(cls, target: TrainingTarget, ids: Tensor) -> OutputLayer:
        """The layer for tokens [D] int64."""
        lm, is_capped = target.lm, bool(getattr(target.config, "final_logit_softcapping", None))
        ids = ids.to(target.device)
        with torch.no_grad():
            units = torch.eye(target.hidden_size, dtype=lm.dtype, device=target.device)
            zero = lm.head(torch.zeros_like(units[:1]))[:, ids].float()
            columns = [lm.head(part)[:, ids].float() - zero for part in torch.split(units, _UNITS)]
            return cls(ids, torch.cat(columns).T.contiguous(), zero[0], lm if is_capped else None)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [n, D] float32 of final states [n, hidden]."""
        with torch.no_grad():
            if self._lm is not None:
                return self._lm.head(states)[:, self.ids].float()
            return torch.nn.functional.linear(states.float(), self.weight, self._bias)


def _pieces(path: Path) -> Iterator[bytes]:
    """Pieces of a file, from its beginning to its end and evenly between: another training changes all weights."""
    last = max(path.stat().st_size - _BYTES, 0)
    with path.open("rb") as file:
        for place in sorted({last * i // (_NUM_PIECES - 1) for i in range(_NUM_PIECES)}):
            file.seek(place)
            yield file.read(_BYTES)
