"""Load a tiny checkpoint in every form of files, beside transformers' model of the numbers that the form means.

    python benchmarks/file_forms.py              # all forms: about two minutes
    python benchmarks/file_forms.py gptq awq     # some forms; prints, keeps nothing

For each form: logits in float32 and bfloat16, tokens without a draft and with the model as its own draft (all of them
dequantized), bits of a weight in the file and in memory, and whether `--quantize int8` keeps its whole numbers.
`scripts/docs_models.py` writes docs/models.md from the result.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import machine, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec_cli.errors import SpecdecError
from specdec_cli.lm.door import Row
from specdec_cli.lm.load import load_lm
from specdec_cli.lm.oracle import relative_error
from specdec_cli.lm.transformers_lm import TransformersLM

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
tiny_models, tiny_quantized, tiny_engine, tiny_gguf, tiny_adapters = (
    importlib.import_module(name)
    for name in ("tiny_models", "tiny_quantized", "tiny_engine", "tiny_gguf", "tiny_adapters")
)
TOKENS = [5, 17, 3, 40, 41, 9, 77, 60, 3, 8, 31, 90, 4, 11]
SIZES = {"hidden_size": 256, "intermediate_size": 512}
Made = tuple[Path, Path | None]
"""A checkpoint, and transformers' form of the numbers that it means."""


def quantized(folder: Path, form: str) -> Made:
    """A checkpoint of one of the tests' forms."""
    path = tiny_quantized.make_quantized(form, folder, **SIZES)
    reference = folder / "reference"
    return path, reference if reference.exists() else None


def mxfp4(folder: Path) -> Made:
    """gpt-oss with its experts in 4 bits."""
    return tiny_quantized.make_mxfp4(folder), folder / "reference"


def gguf(folder: Path, form: str) -> Made:
    """A GGUF file."""
    reference = tiny_models.make_tiny("llama", folder / "reference", **tiny_gguf.SIZES)
    written = tiny_gguf.write_gguf(reference, folder / f"{form}.gguf", form)
    path = reference / "model.safetensors"
    save_file(load_file(path) | written, path, metadata={"format": "pt"})
    return folder / f"{form}.gguf", reference


def adapter(folder: Path, **settings: Any) -> Made:
    """A LoRA folder, and the base model with the product of its matrices added by hand, for plain LoRA."""
    base = tiny_models.make_tiny("llama", folder / "base", **SIZES)
    made = tiny_adapters.make_adapter(base, folder / "adapter", **settings)
    weights, own = load_file(base / "model.safetensors"), load_file(made / "adapter_model.safetensors")
    scale = 8 / 8  # lora_alpha by r, both peft's defaults
    for key in [key for key in own if key.endswith("lora_A.weight")]:
        name = key.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[name] += scale * own[key.replace("lora_A", "lora_B")] @ own[key]
    reference = shutil.copytree(base, folder / "reference")
    save_file(weights, reference / "model.safetensors", metadata={"format": "pt"})
    return made, reference


def pickled(folder: Path) -> Made:
    """`pytorch_model.bin`."""
    made, reference = (tiny_models.make_tiny("llama", folder / name, **SIZES) for name in ("made", "reference"))
    torch.save(load_file(made / "model.safetensors"), made / "pytorch_model.bin")
    (made / "model.safetensors").unlink()
    return made, reference


FORMS: dict[str, Callable[[Path], Made]] = {
    "pytorch_model.bin": pickled,
    "LoRA folder": adapter,
    **{f"GGUF {form}": partial(gguf, form=form) for form in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q4_K, F16")},
    "MXFP4 (gpt-oss)": mxfp4,
    **{form: partial(quantized, form=form) for form in tiny_quantized.FORMS},
}


def check(path: Path, reference: Path | None) -> dict[str, Any]:
    """The outcome of a checkpoint beside its reference."""
    try:
        lm = load_lm(str(path), dtype="float32", compute="dequantized")
    except SpecdecError as error:
        return {"outcome": "refused", "reason": error.message.replace(str(path), path.name)}
    if reference is None:
        return {"outcome": "wrong", "reason": "nothing is known of the numbers that it means"}
    right = logits(reference)
    rounded, as_kept = load_lm(str(path), dtype="bfloat16", compute="dequantized"), load_lm(str(path), dtype="bfloat16")
    off = relative_error(scores(lm), right)
    plain, own = (tiny_engine.tokens(tiny_engine.decode(lm, draft)) for draft in (None, lm))
    greedy = tiny_engine.transformers_greedy(reference, tiny_engine.PROMPTS)
    is_equal = all(found == other[: len(found)] for found, other in zip(plain, greedy, strict=True)) and plain == own
    correlation = float(torch.corrcoef(torch.stack([scores(rounded).float().flatten(), right.flatten()]))[0, 1])
    found = {
        "outcome": "equal" if off < 1e-5 and is_equal and correlation > 0.99 else "wrong",
        "decoder": as_kept.decoder,
        "error": off,
        "correlation": correlation,
        "bits_in_file": bits_in_file(path, reference),
        "bits_in_memory": bits_in_memory(as_kept),
    }
    try:
        int8 = load_lm(str(path), quantize="int8")
    except SpecdecError as error:
        return found | {"int8_reason": error.message.replace(str(path), path.name)}
    keeps = keeps_whole_numbers(reference)
    return found | {"int8_bits": bits_in_memory(int8), "int8_error": relative_error(scores(int8), right), "int8": keeps}


def scores(lm: TransformersLM) -> Tensor:
    """Logits [n, V] of the text."""
    return lm.score([Row(0, TOKENS, len(TOKENS))])


@torch.no_grad()
def logits(reference: Path) -> Tensor:
    """Those of transformers."""
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    found: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


def matrices(folder: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint's layers."""
    return {
        key: one for key, one in load_file(folder / "model.safetensors").items() if "layers." in key and one.dim() > 1
    }


def bits_in_file(path: Path, reference: Path) -> float | None:
    """Bits of a layer's weight in the file, scales included; None for an adapter, which has few of them."""
    if path.suffix == ".gguf":
        reader = importlib.import_module("gguf").GGUFReader(path)
        layers = [one for one in reader.tensors if one.name.startswith("blk.") and len(one.shape) > 1]
        return round(8 * sum(int(one.n_bytes) for one in layers) / sum(int(one.n_elements) for one in layers), 2)
    if not (path / "model.safetensors").exists():
        return None if not (path / "pytorch_model.bin").exists() else 32.0
    whole = matrices(reference)
    stored = 0
    layers_of = {key.removesuffix(".weight") for key in whole}
    with safe_open(path / "model.safetensors", framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (no mapping)
            if any(key.startswith(layer) for layer in layers_of):
                tensor = file.get_tensor(key)
                stored += tensor.numel() * tensor.element_size()
    return round(8 * stored / sum(one.numel() for one in whole.values()), 2)


def bits_in_memory(lm: TransformersLM) -> float:
    """Bits of a layer's weight in memory, scales included."""
    layers = [one for one in lm.weights if "layers." in one.name and one.is_matrix]
    return round(8 * sum(one.num_bytes for one in layers) / sum(one.num_numbers for one in layers), 2)


def keeps_whole_numbers(reference: Path) -> bool:
    """Whether a scale for each output channel gives back a form's numbers, as the int8 kernel packs them."""
    for weight in matrices(reference).values():
        scale = weight.abs().amax(1, keepdim=True) / 127
        if not torch.allclose((weight / scale).round() * scale, weight, rtol=1e-4, atol=1e-6):
            return False
    return True


def main() -> None:
    """Check all forms, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", help="forms; none means all of them, kept in results/")
    asked = parser.parse_args().forms
    before, found = machine(), {}
    for form in asked or FORMS:
        with tempfile.TemporaryDirectory() as room:
            found[form] = check(*FORMS[form](Path(room)))
        print(f"{form:36} {found[form]['outcome']:8} {found[form].get('reason', '')}", flush=True)
    if not asked:
        print(save("file_forms", before, found))


if __name__ == "__main__":
    main()
