"""Language models that training begins with, and the folders of those that it ends with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec_cli.errors import UsageError
from specdec_cli.lm.decoders import TRANSFORMERS
from specdec_cli.lm.files.checkpoint import clear_errors, find_checkpoint
from specdec_cli.lm.files.gguf_folder import write_gguf_tokenizer
from specdec_cli.lm.files.names import DRAFT_TOKENS
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.from_files import model_from_files
from specdec_cli.lm.load import load_tokenizer
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.text.tokenizer import Tokenizer
from specdec_cli.train.disk import writing
from specdec_cli.train.target import TrainingTarget

_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
                    "*.tiktoken", "tekken.json", "chat_template*", "generation_config.json")  # fmt: skip


@dataclass(frozen=True, slots=True)
class StartModel:
    """A language model that training begins with.

    Args:
        name: hub id or folder.
        folder: where it is.
        vocab_size: tokens that it reads and scores.
    """

    name: str
    folder: Path
    vocab_size: int

    def model(self) -> Any:
        """The model of transformers in float32, ready to be trained; on torch's `meta` device, its skeleton.

        Raises:
            RunError: it does not load.
        """
        if torch.get_default_device().type == "meta":
            return self.skeleton()
        plan = ModelPlan(self.name, decoder=TRANSFORMERS)
        cap_scores(plan.config)
        with quiet(), clear_errors(self.name):
            return model_from_files(plan, has_our_attention=False, dtype=torch.float32).train()

    def skeleton(self) -> Any:
        """The model of transformers without weights, which shows what it is made of.

        Raises:
            RunError: its configuration cannot be read.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        with quiet(), clear_errors(self.name), torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder, local_files_only=True))


def cap_scores(config: Any) -> None:
    """Choose attention that soft-caps scores where a configuration asks for it (Gemma 2).

    The kernel that transformers before 5.23 would choose leaves the cap out.
    """
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        config._attn_implementation = "eager"


def load_start(name: str | None, target: TrainingTarget, method: str) -> StartModel:
    """The model that a method begins with.

    Raises:
        UsageError: there is no name, the tokenizers differ, its layers keep a state, or it lacks tokens.
        RunError: there is no such model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if name is None:
        message = f"`{method}` trains a language model, and there is none to begin with"
        raise UsageError(message, "name a small model with the target's tokenizer: --start-from MODEL")
    folder = find_checkpoint(name, None, trust_remote_code=False).folder
    with quiet(), clear_errors(name):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        made = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if hasattr(config, DRAFT_TOKENS):
        message = f"`{name}` is a draft with a reduced vocabulary, which is not trained further"
        raise UsageError(message, "begin with a model that has all of them")
    if getattr(made, "_is_stateful", False):
        message = f"`{name}` has layers with a state, which cannot leave masks out"
        raise UsageError(message, "begin with a model that has attention alone")
    own, other = (Tokenizer(load_tokenizer(model)) for model in (target.lm.name, name))
    overlap = own.compare(other)
    if not overlap.equal:
        message = f"the tokenizers of target `{target.lm.name}` and `{name}` differ: {overlap.reason}"
        raise UsageError(message, "begin with a model that has the target's tokenizer")
    return StartModel(name, folder, int(config.get_text_config().vocab_size))


def write_language_model(model: Any, source: Path, folder: Path, keys: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Write a model's folder: configuration, safetensors, and the files of its tokenizer.

    Args:
        model: of transformers.
        source: the folder that has its tokenizer.
        folder: exists.
        keys: further ones of its configuration.
        dtype: of its weights there: the target's, as it decodes beside that.

    Raises:
        RunError: the disk is full, or the folder cannot be written.
    """
    for key, value in {**keys, "dtype": dtype}.items():
        setattr(model.config, key, value)
    with writing(folder), quiet():
        model.save_pretrained(folder, state_dict={name: its.to(dtype) for name, its in model.state_dict().items()})
        write_gguf_tokenizer(source)
        for pattern in _TOKENIZER_FILES:
            for path in sorted(source.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
