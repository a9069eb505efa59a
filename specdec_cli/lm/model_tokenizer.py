"""The tokenizer of a model: of its folder, of its GGUF file, or a stand-in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec_cli.errors import RunError
from specdec_cli.lm.files import dummy
from specdec_cli.lm.files.adapter import adapter_of, has_own_tokenizer
from specdec_cli.lm.files.backend_tokenizer import BackendTokenizer
from specdec_cli.lm.files.checkpoint import remote_code_error
from specdec_cli.lm.files.gguf_folder import gguf_links, read_gguf_tokenizer
from specdec_cli.lm.files.names import BUILTIN
from specdec_cli.lm.files.reading import quiet
from specdec_cli.lm.files.tokenizer_files import TOKENIZER_FILES, check_tokenizer, tokenizer_error

if TYPE_CHECKING:
    from specdec_cli.lm.plan import ModelPlan


def tokenizer_of(plan: ModelPlan) -> Any:
    """A model's transformers tokenizer; where the weights are random, one stands in for none.

    Raises:
        RunError: there is none, or it is broken.
    """
    name, folder, trusted = plan.name, plan.folder, plan.trust_remote_code
    if not any((folder / file).exists() for file in TOKENIZER_FILES) and not list(folder.glob("*.model")):
        with plan.quietly():
            config = plan.stored_config
        if plan.is_dummy:
            return dummy.stand_in_tokenizer(config)
        raise RunError(f"model `{name}` has no tokenizer", "give a model folder that holds `tokenizer.json`")
    try:
        if name in BUILTIN:
            return BackendTokenizer.of_folder(folder, name)
        if gguf_links(folder) and not has_own_tokenizer(folder):
            tokenizer = read_gguf_tokenizer(folder)
            # An adapter's settings may have tokens of their own.
            return tokenizer if adapter_of(folder) is None else tokenizer.of_transformers
    except Exception as error:
        raise tokenizer_error(name, folder, error) from error
    import transformers

    from specdec_cli.lm.template_limits import limit_templates

    limit_templates()
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trusted, local_files_only=True
            )
        except Exception as error:
            if (folder / "config.json").is_file():  # which transformers reads first; it may be the broken one
                plan.checkpoint.config(trusted)
            raise remote_code_error(name, error) or tokenizer_error(name, folder, error) from error
        check_tokenizer(name, folder, tokenizer)
    tokenizer.name_or_path = name  # messages name the model as the user does, and not the hub's cache
    return tokenizer
