"""The files that hold a model's weights: which they are, and whether they are whole."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specdec_cli.errors import RunError, WeightsError
from specdec_cli.lm.files.adapter import adapter_files, adapter_of, adapter_words, shown
from specdec_cli.lm.files.contents import check_pointer
from specdec_cli.lm.files.gguf_folder import gguf_header_of, gguf_links
from specdec_cli.lm.files.gguf_header import SUFFIX
from specdec_cli.lm.files.headers import is_pickled, not_finite, read_pickle
from specdec_cli.lm.files.reading import broken_link, first_line, read_object

PICKLED = "pytorch_model.bin"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weights_files(name: str, folder: Path) -> list[str]:
    """The files of weights that the model needs, by name, in order.

    Raises:
        RunError: the folder does not say.
    """
    index = folder / "model.safetensors.index.json"
    if gguf_links(folder):
        return gguf_links(folder)
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        return _indexed_files(index)
    has_shards = any(folder.glob("*.safetensors"))  # that something names wrongly: its error tells more
    if (folder / PICKLED).is_file() and not has_shards:
        return [PICKLED]
    if (folder / f"{PICKLED}.index.json").is_file() and not has_shards:
        return _indexed_files(folder / f"{PICKLED}.index.json")
    raise _no_weights(name, folder)


def all_files(name: str, folder: Path) -> list[str]:
    """The files that the model's numbers come from: those of weights, and an adapter's."""
    return [*weights_files(name, folder), *adapter_files(folder)]


def stored_bytes(name: str, folder: Path) -> int:
    """The size of the files of weights."""
    return sum((folder / file).stat().st_size for file in all_files(name, folder))


def stored_as(name: str, folder: Path, method: str | None) -> str:
    """The form of the files of weights, for people."""
    header, adapter, count = gguf_header_of(name, folder), adapter_words(folder), len(gguf_links(folder))
    if header is not None:
        return f"GGUF ({', '.join(header.kinds)}){f' in {count} parts' if count > 1 else ''}{adapter}"
    files = "pickled tensors" if is_pickled(weights_files(name, folder)[0]) else "safetensors"
    return f"{files if method is None else f'{method} in {files}'}{adapter}"


def _indexed_files(index: Path) -> list[str]:
    """The files that an index of shards names.

    Raises:
        RunError: it is no index, or it names files that are not beside it.
    """
    hint = "copy or download the model again"
    content = read_object(index)
    for key in ("weight_map", "metadata"):  # transformers reads both
        if not isinstance(content.get(key), dict):
            raise RunError(f"`{index}` cannot be read: it has no `{key}`", hint)
    files = content["weight_map"].values()
    if not files or not all(isinstance(file, str) for file in files):
        raise RunError(f"`{index}` cannot be read: its `weight_map` names no files", hint)
    outside = next((file for file in files if Path(file).name != file), None)
    if outside is not None:
        raise RunError(f"`{index}` names `{outside}`, which is not a file beside it", hint)
    return sorted(set(files))


def _no_weights(name: str, folder: Path) -> RunError:
    """Description of the files that a folder has instead of the weights that transformers looks for."""
    whose = f"`{name}`" if adapter_of(folder) is None else f"the base model of `{name}`"
    shards = sorted(path.name for path in folder.glob("*.safetensors") if not path.is_dir())
    broken = next((shard for shard in shards if not (folder / shard).exists()), None)
    if broken is not None:
        return broken_link(folder / broken)
    if any(list(folder.glob(pattern)) for pattern in PICKLES) and not shards:
        return RunError(
            f"{whose} has pickled weights, but none that is named `{PICKLED}`",
            "rename the file if it holds a state dict, or convert the model to safetensors",
        )
    if any(re.search(r"-\d+-of-\d+\.safetensors$", shard) for shard in shards):
        message = f"{whose} has `{shards[0]}` and no `model.safetensors.index.json`, which says what is in which file"
        return RunError(message, "copy or download the model again")
    if shards:
        return RunError(
            f"{whose} has no `model.safetensors`, only `{shards[0]}`", "rename it, or give the folder of a whole model"
        )
    return RunError(
        f"{whose} has no weights: `model.safetensors` is missing", "give the folder that holds the model's weights"
    )


def check_weights(name: str, folder: Path) -> None:
    """See that every file of weights that the model needs is there and whole.

    Raises:
        RunError: one is not.
    """
    hint = "copy or download the model again"
    for file in all_files(name, folder):
        path = shown(folder, file)
        if path.is_symlink() and not path.exists():
            raise broken_link(path)
        if not path.is_file():
            raise RunError(f"`{name}` lacks the weights file `{file}`", hint)
        check_pointer(path)
        if file.endswith((SUFFIX, ".json")):
            continue  # the header was read, or the adapter's configuration, to make the folder
        if is_pickled(file):
            read_pickle(path)
            continue
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            message = first_line(error).removeprefix("Error while deserializing header: ")
            raise RunError(f"`{path}` is not a whole safetensors file: {message}", hint) from error


def check_numbers(name: str, folder: Path) -> None:
    """See that all weights are finite numbers; what is quantized is checked when it is dequantized.

    Raises:
        WeightsError: one is infinite or NaN.
        RunError: a file is missing or broken.
    """
    for file in all_files(name, folder):
        if file.endswith((SUFFIX, ".json")):
            continue
        key = not_finite(shown(folder, file))
        if key is not None:
            message = f"the weight `{key}` of `{name}` holds numbers that are not finite"
            raise WeightsError(message, "copy or download the model again")
