"""A model's folder and its configuration: where they are, what they say; each fault is one clear sentence."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec_cli.errors import RunError, SpecdecError, UsageError
from specdec_cli.files import given_path
from specdec_cli.libraries import blamed
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import adapter_folder, shown
from specdec_cli.lm.files.contents import check_contents, check_pointer, is_adapter
from specdec_cli.lm.files.gguf_choice import local_gguf
from specdec_cli.lm.files.gguf_folder import gguf_folder
from specdec_cli.lm.files.gguf_header import SUFFIX
from specdec_cli.lm.files.model_folder import ModelFolder, Wanted
from specdec_cli.lm.files.names import SHAPE, check_name
from specdec_cli.lm.files.reading import (
    broken_link,
    check_counts,
    first_line,
    read_object,
)

FAMILIES = "Llama, Qwen, Mistral, Gemma, Phi-3, GPT-2, GPT-NeoX, Falcon, ..."


@dataclass(frozen=True)
class Checkpoint(ModelFolder):
    """A model's files on this machine, and its configuration as transformers has it.

    Args:
        name: of the model, for messages.
        folder: of its files; of a GGUF file or an adapter a folder that was made for it.
        adapter: an adapter's configuration, as its file has it; None for other models.
    """

    adapter: Mapping[str, Any] | None = None

    @property
    def config_path(self) -> Path:
        """The path of its configuration as the user has it, for messages."""
        return shown(self.folder, "config.json")

    def config(self, trust_remote_code: bool) -> Any:
        """A new transformers configuration of it.

        Raises:
            UsageError: transformers does not know the architecture, or it needs the model's own code.
            RunError: there is no configuration, or it is broken.
        """
        changes = dummy.shape_changes(self.name)
        path, content = self.config_path, self.content
        kind = content.get("model_type")
        if not isinstance(kind, str):
            raise RunError(f"`{path}` does not say a `model_type`", "give the folder of a transformers model")
        check_counts(path, content)
        try:
            config = self._transformers_config(kind, trust_remote_code, changes)
            return _with_own_quantization(self.folder, config)
        except SpecdecError:
            raise
        except Exception as error:
            unknown = "does not recognize this architecture" in str(error)
            raise remote_code_error(self.name, error) or (
                UsageError(f"architecture `{kind}` of `{self.name}` is unknown to transformers", "upgrade transformers")
                if unknown
                else RunError(
                    *blamed(f"`{path}` is not a valid configuration: {first_line(error)}", "download the model again")
                )
            ) from error

    def _transformers_config(self, kind: str, trust_remote_code: bool, changes: dict[str, int]) -> Any:
        """The configuration by transformers' class for its `model_type`, or by the model's own code."""
        import transformers

        has_code = "AutoConfig" in (self.content.get("auto_map") or {})
        names_another_file = "configuration_files" in self.content
        if kind == "mistral" and "layer_types" in self.content:  # as transformers' AutoConfig does
            kind = "ministral"
        if kind not in transformers.CONFIG_MAPPING or (has_code and trust_remote_code) or names_another_file:
            return transformers.AutoConfig.from_pretrained(
                self.folder, trust_remote_code=trust_remote_code, local_files_only=True, **changes
            )
        content = copy.deepcopy(self.content) | {"model_type": kind}
        return transformers.CONFIG_MAPPING[kind].from_dict(content, name_or_path=str(self.folder), **changes)


def find_checkpoint(
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    has_weights: bool = True,
    *,
    is_head: bool = False,
    fetches_weights: bool = True,
) -> Checkpoint:
    """The files behind a name; those of a hub id are fetched, or found in the local cache.

    Args:
        name: a local folder, a GGUF file, `FOLDER:CHOICE` of GGUF files, a hub id, a built-in name or a shape.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: fetch Python files too.
        has_weights: its weights are wanted, now or later.
        is_head: it holds a draft head, whose weights may be pickled.
        fetches_weights: fetch a hub id's weights, too, if they are wanted.

    Raises:
        UsageError: an unknown built-in name or shape, something else than a causal LM, or a revision of what is here.
        RunError: there is no such folder, or it cannot be fetched.
    """
    wanted = Wanted(trust_remote_code, has_weights, is_head, fetches_weights)
    own = _own_checkpoint(name, revision, wanted)
    if revision is not None and (name.startswith((SHAPE, "builtin:")) or local_gguf(name) or given_path(name).is_dir()):
        message = f"the revision `{revision}` has no meaning for `{name}`: only models on the hub have revisions"
        raise UsageError(message, "leave it out")
    if not is_adapter(own.folder):
        return own
    base = partial(_own_checkpoint, wanted=wanted)
    return Checkpoint(name, *adapter_folder(name, own.folder, lambda *of_base: base(*of_base).folder))


def _own_checkpoint(name: str, revision: str | None, wanted: Wanted) -> Checkpoint:
    """The files that a name itself leads to, which may be an adapter's."""
    check_name(name)
    if name.startswith(SHAPE):
        return Checkpoint(name, dummy.shape_folder(name))
    if name.startswith("builtin:"):
        folder = Path(__file__).parents[2] / "builtin" / name.removeprefix("builtin:")
        if not folder.is_dir():
            raise RunError(f"the weights of `{name}` are not installed", "install specdec-cli again")
        return Checkpoint(name, folder)
    path = given_path(name)
    if name.strip() and path.is_symlink() and not path.exists():
        raise broken_link(path)
    gguf = local_gguf(name) if name.strip() else None
    if gguf is None and not (name.strip() and path.is_dir()):
        from specdec_cli.lm.files.hub import fetch  # takes a tenth of a second

        path = fetch(name, revision, wanted)
        gguf = path if path.suffix == SUFFIX and path.is_file() else None
    if gguf is not None:
        check_pointer(gguf)
        return Checkpoint(name, gguf_folder(name, gguf))
    checkpoint = Checkpoint(name, path)
    check_contents(checkpoint, wanted.is_model)
    return checkpoint


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
