"""A LoRA folder as a model folder: its base model's files, its own tokenizer, and a link to the adapter itself.

The base may be anything that this engine loads. Its weights and those of the adapter stay where they are.
"""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.files import given_path
from specdec_cli.lm.files.contents import ADAPTER as CONFIG
from specdec_cli.lm.files.contents import is_adapter
from specdec_cli.lm.files.reading import read_object
from specdec_cli.lm.files.tokenizer_files import TOKENIZER_FILES, VOCABULARIES

LINK = "specdec-adapter"
"""The link to the adapter's folder; a name that no model's folder has."""
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_OWN = ("generation_config.json", "chat_template.jinja", "chat_template.json")
_TOKENIZER = (*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json", *_OWN[1:])
_VARIANTS = {
    "alora_invocation_tokens": "which works only behind some tokens (activated LoRA)",
    "arrow_config": "which chooses between adapters for every token (Arrow)",
    "layer_replication": "which repeats layers of its base model",
    "loftq_config": "which was trained on a base model that LoftQ had quantized",
    "corda_config": "which was trained on a base model that CorDA had changed",
    "lora_ga_config": "which was trained on a base model that LoRA-GA had changed",
    "megatron_config": "which belongs to a Megatron model",
    "kasa_config": "in KaSA's form",
    "velora_config": "in VeLoRA's form",
    "monteclora_config": "in MonteCLoRA's form",
    "use_bdlora": "in BD-LoRA's form",
    "use_qalora": "in QA-LoRA's form",
}
"""Settings of LoRA adapters that are not merged, and what they mean."""
_BEGUN = (None, True, False, "gaussian", "eva", "orthogonal", "olora", "pissa")
"""Beginnings of training (`init_lora_weights`) that leave the base as it was, or that peft repeats exactly."""


def adapter_of(folder: Path) -> Path | None:
    """The adapter's folder behind one that `adapter_folder` made; None for others."""
    path = folder / LINK
    return path.resolve() if path.is_symlink() else None


def has_own_tokenizer(folder: Path) -> bool:
    """Whether a folder that `adapter_folder` made has the adapter's tokenizer in the place of its base model's."""
    path = adapter_of(folder)
    return path is not None and _has_tokenizer(path)


def _has_tokenizer(path: Path) -> bool:
    return any((path / file).is_file() for file in VOCABULARIES) or any(path.glob("*.model"))


def adapter_files(folder: Path) -> list[str]:
    """The adapter's configuration and weights, by their paths in the made folder; none without an adapter.

    Raises:
        RunError: it has no weights.
    """
    path = adapter_of(folder)
    if path is None:
        return []
    weights = next((file for file in _WEIGHTS if (path / file).is_file()), None)
    if weights is None:
        message = f"the adapter in `{path}` has no weights: `{_WEIGHTS[0]}` is missing"
        raise RunError(message, "give the folder that holds the adapter's weights, too")
    return [f"{LINK}/{CONFIG}", f"{LINK}/{weights}"]


def read_adapter(name: str, path: Path) -> dict[str, Any]:
    """The configuration of a LoRA adapter.

    Raises:
        UsageError: it is another kind of adapter, or one that cannot be merged into its base model.
        RunError: the file is broken, or names no base model.
    """
    content = read_object(path / CONFIG)
    kind = str(content.get("peft_type") or "LORA").upper()
    whole = "give a folder of a whole model, with the adapter merged into it"
    if kind != "LORA":
        raise UsageError(f"`{name}` is a PEFT adapter ({kind}), and only LoRA adapters are supported", whole)
    task = content.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise UsageError(f"`{name}` is a LoRA adapter for `{task}`, not for a causal LM", "choose one for `CAUSAL_LM`")
    variant = next((key for key in _VARIANTS if content.get(key)), None)
    if variant is not None:
        raise UsageError(f"`{name}` is a LoRA adapter {_VARIANTS[variant]}: it cannot be merged", whole)
    if content.get("init_lora_weights") not in _BEGUN:
        message = f"`{name}` is a LoRA adapter with `init_lora_weights: {content['init_lora_weights']}`, which changed"
        raise UsageError(f"{message} its base model in a way that the folder does not keep", whole)
    base = content.get("base_model_name_or_path")
    if not isinstance(base, str) or not base.strip():
        message = f"`{name}` is a LoRA adapter whose `{CONFIG}` does not name its base model"
        raise RunError(message, "add `base_model_name_or_path`, a folder or a hub id, to that file")
    return content


def adapter_folder(name: str, path: Path, find: Callable[[str, str | None], Path]) -> tuple[Path, dict[str, Any]]:
    """The folder of an adapter's base model with the adapter beside it, made once for a process; and its configuration.

    Raises:
        UsageError: an adapter of another kind or of an adapter, or a base model that is not found.
        RunError: the configuration is broken.
    """
    content = read_adapter(name, path)
    base, revision = content["base_model_name_or_path"], content.get("revision")
    beside = path / base
    if not given_path(base).exists() and beside.is_dir():
        base = str(beside)
    hint = f"name a folder or a hub id in `base_model_name_or_path` of `{path / CONFIG}`"
    try:
        base_folder = find(base, revision if isinstance(revision, str) else None)
    except SpecdecError as error:
        message = f"`{name}` is a LoRA adapter, and its base model cannot be used: {error.message}"
        raise UsageError(message, hint) from error
    if is_adapter(base_folder):
        raise UsageError(f"`{name}` is a LoRA adapter of `{base}`, which is an adapter itself", hint)
    path, base_folder = path.absolute(), base_folder.absolute()
    files = (tuple(sorted(map(str, folder.iterdir()))) for folder in (path, base_folder))
    return _made(path, base_folder, *files), content


@lru_cache(maxsize=16)
def _made(path: Path, base: Path, files: tuple[str, ...], base_files: tuple[str, ...]) -> Path:
    """Make the folder, which goes with the process, of the files that both have now."""
    folder = Path(mkdtemp(prefix="specdec-adapter-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    is_tokenizer_own = _has_tokenizer(path)
    for file in map(Path, base_files):
        is_tokenizer = file.name in _TOKENIZER or file.suffix == ".model"
        if file.name != CONFIG and not (is_tokenizer_own and is_tokenizer):
            (folder / file.name).symlink_to(file)
    for file in map(Path, files):
        if file.name in (*_TOKENIZER, *_OWN) or file.suffix == ".model":
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file)
    (folder / LINK).symlink_to(path)
    return folder


def check_adapter(name: str, folder: Path, quantized: str | None) -> None:
    """See that an adapter can be merged here: its package, its base model's numbers, its files.

    Args:
        name: for messages.
        folder: of the model; nothing is checked of one that has no adapter.
        quantized: the form of the base model's weights once they are loaded; None for plain numbers.

    Raises:
        UsageError: the base model stays quantized.
        RunError: `peft` is not installed, or the weights are missing or broken.
    """
    path = adapter_of(folder)
    if path is None:
        return
    if find_spec("peft") is None:
        message = f"`{name}` is a LoRA adapter, which takes the package `peft`, and that is not installed"
        raise RunError(message, "pip install 'specdec-cli[lora]'")
    if quantized is not None:
        message = (
            f"the base model of `{name}` is quantized by `{quantized}` and stays so, and an adapter is merged into"
        )
        raise UsageError(
            f"{message} plain numbers alone", "name an unquantized base model in its `adapter_config.json`"
        )


def adapter_words(folder: Path) -> str:
    """The adapter that is merged into a model's weights, for people; empty without one."""
    path = adapter_of(folder)
    if path is None:
        return ""
    content = read_object(path / CONFIG)
    kinds = [f"rank {content.get('r', 8)}"]
    kinds += [word for key, word in (("use_rslora", "rank-stabilized"), ("use_dora", "DoRA")) if content.get(key)]
    return f" with a LoRA adapter ({', '.join(kinds)})"


def shown(folder: Path, file: str) -> Path:
    """The path of a model's file as the user has it, for messages."""
    adapter, path = adapter_of(folder), folder / file
    if adapter is not None and file.startswith(f"{LINK}/"):
        return adapter / path.name
    return path.readlink() if adapter is not None and path.is_symlink() else path
