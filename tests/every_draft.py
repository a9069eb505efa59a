"""One tiny target and a draft of every method for it, as the tool loads them; a new method is found in the registry."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tiny_dflash import publish_dflash, random_block_weights
from tiny_engine import Checked
from tiny_heads import publish, random_weights
from tiny_medusa import publish_medusa, random_medusa_weights
from tiny_models import make_tiny
from tiny_mtp import make_target
from tiny_pard import publish_pard
from tiny_pard2 import publish_pard2
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from typed import not_none, stand_in

from specdec_cli import drafters
from specdec_cli.engine.build import load_engines
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.loading import LoadSettings, ModelSettings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.lm.files.draft_formats import kinds_by_method

T = TypeVar("T")
NUM_LAYERS = 6
LETTERS = [*string.ascii_letters, *string.digits, *".,!?'-:;()[]{}<>=+*/&%$#@"]


def tokenizer(letters: Sequence[str], pairs: Sequence[str]) -> PreTrainedTokenizerFast:
    """An end token at 0, characters, a space, and pairs of characters; llguidance reads it."""
    words = ["</s>", *letters, "Ġ", *pairs]
    backend = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [(pair[0], pair[1]) for pair in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


TOKENIZER = tokenizer(LETTERS, ["ab", "cd", "th", "he"])
OTHER_TOKENIZER = tokenizer([*reversed(LETTERS)], ["ab", "er"])


def _model(folder: Path) -> None:
    make_tiny("llama", folder, 9, num_hidden_layers=1)


def _universal(folder: Path) -> None:
    make_tiny("llama", folder, 9, num_hidden_layers=1, vocab_size=len(OTHER_TOKENIZER))
    OTHER_TOKENIZER.save_pretrained(folder)


def _dspark(folder: Path) -> None:
    publish_dflash(folder, random_block_weights(dspark="gated"), "dspark", markov_head_type="gated")


def _dflash2(folder: Path) -> None:
    publish_dflash(folder, random_block_weights(dflash2=True), "dflash2")


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "model": _model,
    "universal": _universal,
    "eagle": lambda folder: publish(folder, random_weights(False), "eagle"),
    "eagle3": lambda folder: publish(folder, random_weights(True), "speculators"),
    "p-eagle": lambda folder: publish(
        folder, random_weights(True, layers=2, masked=True), "peagle", mask_token_id=5
    ),
    "dflash": lambda folder: publish_dflash(folder, random_block_weights(), "z-lab"),
    "dspark": _dspark,
    "dflash2": _dflash2,
    "medusa": lambda folder: publish_medusa(folder, random_medusa_weights()),
    "pard": publish_pard,
    "pard2": publish_pard2,
}  # fmt: skip
"""Makers of the drafts that are read from a folder, by method or by kind."""
KINDS = {"dspark": "dflash", "dflash2": "dflash"}
"""Kinds that another kind's method runs."""
_WORDS = {
    "ngram": "ngram:max=3,min=1",
    "suffix": "suffix:min_expected=0,min_prob=0.05",
    "self-exit": "self-exit:2",
    "prediction": "prediction:text=eqiRieqqeRiiqeiRqqi",
}
"""How the drafts that need no folder are asked for where their defaults would seldom guess."""
_PAIRS = {"ngram+eagle3": "ngram:max=3,min=1+{eagle3}", "suffix+model": "suffix:min_prob=0.3+{model}"}
METHODS = sorted(drafters.methods())
NAMES = [*(method for method in METHODS if method != "none"), *KINDS, *_PAIRS]
"""Every draft: each method of the registry, variants with parts of their own, and pairs."""


def publish_draft(name: str, folder: Path) -> None:
    """Save a draft of FOLDERS, with the target's tokenizer if it has one."""
    FOLDERS[name](folder)
    kind = kinds_by_method().get(name)
    if name == "model" or (kind is not None and kind.has_tokenizer):
        TOKENIZER.save_pretrained(folder)


def specs(folder: Path) -> dict[str, str]:
    """Save the target as `folder/target` and every draft; return them as `--draft` takes them, by name.

    Raises:
        AssertionError: a method reads a folder, and `FOLDERS` has no maker of one.
    """
    make_target("llama", folder / "target", 2, num_hidden_layers=NUM_LAYERS)
    TOKENIZER.save_pretrained(folder / "target")
    found: dict[str, str] = {}
    for name in [*METHODS, *KINDS]:
        if name not in FOLDERS:
            has_folder = name not in drafters.without_model()
            assert not has_folder, f"`{name}` reads a folder: add a maker of a tiny one to tests/every_draft.py"
            found[name] = _WORDS.get(name, name)
            continue
        publish_draft(name, folder / name)
        found[name] = str(folder / name)
    return found | {name: form.format(**found) for name, form in _PAIRS.items()}


class Drafts:
    """The target and all drafts, loaded once; engines are made around them.

    Args:
        folder: where they are saved.
        dtype: of the target.

    Attributes:
        specs: as `--draft` takes them, by name.
        target: the loaded target.
        tokenizer: the target's.
    """

    def __init__(self, folder: Path, dtype: str = "auto") -> None:
        self.specs = specs(folder)
        settings = LoadSettings(ModelSettings(dtype=dtype), kv_cache_bytes=1 << 24, check=False, block_size=4)
        options = EngineOptions(8, max_num_seqs=64)
        loaded = load_engines(Engine, str(folder / "target"), list(self.specs.values()), options=options,
                              settings=settings)  # fmt: skip
        self._loaded = dict(zip(self.specs, loaded, strict=True))
        self.target = stand_in(loaded[0].target)
        self.tokenizer = not_none(loaded[0].tokenizer)
        self._once: dict[str, Any] = {}

    def once(self, find: Callable[..., T], *given: Any, **options: Any) -> T:
        """The result of a function of an engine without a draft, which is asked once for the same arguments.

        Args:
            find: is given the engine.
            given: what it is given beside that.
            options: of the engine.
        """
        key = repr((find.__name__, given, options))
        if key not in self._once:
            self._once[key] = find(self.engine("none", **options), *given)
        found: T = self._once[key]
        return found

    def drafter(self, name: str) -> Any:
        """A loaded drafter, which knows nothing of earlier sequences."""
        found = self._loaded[name].drafter
        found.clear()
        return found

    def engine(self, name: str, k: int = 4, **options: Any) -> Engine:
        """A checked engine around a draft; `none` decodes without one."""
        one = self._loaded[name]
        made = EngineOptions(0 if name == "none" else k, **({"max_num_seqs": 3} | options))
        return Checked(one.target, self.drafter(name), one.tokenizer, made, (0,))
