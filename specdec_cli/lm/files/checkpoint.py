"""A model's folder and its configuration: where they are, what they say; each fault is one clear sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.files import given_path
from specdec_cli.libraries import blamed
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import adapter_folder, shown
from specdec_cli.lm.files.contents import check_contents, check_pointer, is_adapter
from specdec_cli.lm.files.gguf_folder import gguf_folder
from specdec_cli.lm.files.gguf_header import SUFFIX
from specdec_cli.lm.files.hub import Wanted, fetch
from specdec_cli.lm.files.names import SHAPE, check_name
from specdec_cli.lm.files.reading import broken_link, check_counts, first_line, read_object

FAMILIES = "Llama, Qwen, Mistral, Gemma, Phi-3, GPT-2, GPT-NeoX, Falcon, ..."


def model_folder(
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    has_weights: bool = True,
    *,
    is_head: bool = False,
    fetches_weights: bool = True,
) -> Path:
    """The local folder behind a name; a hub id is fetched, or found in the local cache.

    Args:
        name: a local folder, a GGUF file, a hub id, a built-in name or a shape.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: fetch Python files too.
        has_weights: its weights are wanted, now or later.
        is_head: it holds a draft head, whose weights may be pickled.
        fetches_weights: fetch a hub id's weights, too, if they are wanted.

    Raises:
        UsageError: an unknown built-in name or shape, or something else than a causal LM.
        RunError: there is no such folder, or it cannot be fetched.
    """
    wanted = Wanted(trust_remote_code, has_weights, is_head, fetches_weights)
    folder = _own_folder(name, revision, wanted)
    if not is_adapter(folder):
        return folder
    return adapter_folder(name, folder, lambda base, its_revision: _own_folder(base, its_revision, wanted))


def _own_folder(name: str, revision: str | None, wanted: Wanted) -> Path:
    """The folder that a name itself leads to, which may be an adapter's."""
    check_name(name)
    if name.startswith(SHAPE):
        return dummy.shape_folder(name)
    if name.startswith("builtin:"):
        folder = Path(__file__).parents[2] / "builtin" / name.removeprefix("builtin:")
        if not folder.is_dir():
            raise RunError(f"the weights of `{name}` are not installed", "install specdec-cli again")
        return folder
    path = given_path(name)
    if name.strip() and path.is_dir():
        check_contents(name, path, wanted.is_model)
        return path
    if path.suffix == SUFFIX and path.is_file():
        check_pointer(path)
        return gguf_folder(name, path)
    if name.strip() and path.is_symlink():
        raise broken_link(path)
    found = fetch(name, revision, wanted)
    if found.suffix == SUFFIX:
        return gguf_folder(name, found)
    check_contents(name, found, wanted.is_model)
    return found


def read_config(name: str, folder: Path, trust_remote_code: bool) -> Any:
    """The model's configuration, a transformers config.

    Raises:
        UsageError: transformers does not know the architecture, or it needs the model's own code.
        RunError: there is none, or it is broken.
    """
    changes = dummy.shape_changes(name)
    path = shown(folder, "config.json")
    if path.is_symlink() and not path.exists():
        raise broken_link(path)
    if not path.is_file():
        raise RunError(f"model folder `{name}` has no `config.json`", "give the folder that holds the model's files")
    content = read_object(path)
    if not isinstance(content.get("model_type"), str):
        raise RunError(f"`{path}` does not say a `model_type`", "give the folder of a transformers model")
    check_counts(path, content)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True, **changes
        )
        return _with_own_quantization(folder, config)
    except SpecdecError:
        raise
    except Exception as error:
        kind = content["model_type"]
        unknown = "does not recognize this architecture" in str(error)
        raise remote_code_error(name, error) or (
            UsageError(f"architecture `{kind}` of `{name}` is unknown to transformers", "upgrade transformers")
            if unknown
            else RunError(
                *blamed(f"`{path}` is not a valid configuration: {first_line(error)}", "download the model again")
            )
        ) from error


def _with_own_quantization(folder: Path, config: Any) -> Any:
    """A configuration with ModelOpt's description of the weights, where that is in a file of its own."""
    path = folder / "hf_quant_config.json"
    if path.is_file() and getattr(config, "quantization_config", None) is None:
        given = read_object(path).get("quantization")
        if isinstance(given, dict):
            config.quantization_config = {**given, "quant_method": "modelopt"}
    return config


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turn whatever a load raises into one sentence."""
    try:
        yield
    except SpecdecError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise RunError(f"model `{name}` does not fit into memory", "choose a smaller model or dtype") from error
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise RunError(f"model `{name}` does not fit into memory", "choose a smaller model or dtype") from error
        message = f"model `{name}` does not load: {first_line(error)}"
        hint = "load it with transformers alone to see the whole error"
        raise remote_code_error(name, error) or RunError(*blamed(message, hint)) from error


def remote_code_error(name: str, error: Exception) -> UsageError | None:
    """The error for a model that needs its own Python code; None if loading failed for another reason."""
    if "trust_remote_code" not in str(error):
        return None
    return UsageError(f"model `{name}` comes with its own Python code", "read it, then pass --trust-remote-code")
