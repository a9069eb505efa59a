"""Our own decoder's paths for processors that this one is not: the numbers are this one's, and rows keep their bits.

What AVX-512, AVX-VNNI and AMX add is emulated where there is AVX2; a processor without it has everything taken away.
"""

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import compile_otherwise
from tiny_models import make_tiny
from typed import not_none

from specdec_cli.lm.door import Draw, Row
from specdec_cli.lm.llama import native
from specdec_cli.lm.load import load_lm
from specdec_cli.recipe.values import Quantize

EMULATED, TILES, BYTES = (
    Path(__file__).with_name(f"emulated_{name}.h").read_text(encoding="utf-8") for name in ("avx512", "amx", "avx_vnni")
)
AVX512 = ("F", "BW", "VNNI", "BF16")
AVX2 = "#undef __AMX_TILE__\n#undef __AVXVNNI__\n" + "".join(f"#undef __AVX512{name}__\n" for name in AVX512)
ZEN4 = AVX2 + EMULATED + "".join(f"#define __AVX512{name}__ 1\n" for name in AVX512[1:])
PROCESSORS = {
    "no vectors": AVX2 + "#undef __AVX2__\n#undef __FMA__\n#undef __FP_FAST_FMAF\n",
    "no vectors that rounds once": AVX2 + "#undef __AVX2__\n#undef __FP_FAST_FMAF\n#define __FP_FAST_FMAF 1\n",
    "AVX2 without FMA": AVX2 + "#undef __FMA__\n#undef __FP_FAST_FMAF\n",
    "AVX2": AVX2,
    "AVX2 with VNNI": AVX2 + BYTES,
    "AVX-512 alone": AVX2 + EMULATED,
    "AVX-512 with BW": AVX2 + EMULATED + "#define __AVX512BW__ 1\n",
    "AVX-512 of a Zen 4": ZEN4,
    "AMX": ZEN4 + TILES,
}
SHAPE = {"hidden_size": 88, "intermediate_size": 151, "num_attention_heads": 4, "head_dim": 22, "num_hidden_layers": 2}
SHAPES: dict[str, Any] = {"gemma2": SHAPE | {"layer_types": ["sliding_attention", "full_attention"]}}
SHAPES["gpt_oss"] = SHAPE | {"intermediate_size": 152}  # transformers asks for sizes of whole 16 bytes
TEXT = [(11 * i * i + 3 * i) % 97 for i in range(100)]


def has_avx2() -> bool:
    """Whether the compiler makes AVX2 of it here."""
    return native.missing() is None and platform.machine() in ("x86_64", "AMD64") and "avx2" in _flags()


def _flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""


pytestmark = pytest.mark.skipif(not has_avx2(), reason="no compiler, or no AVX2 to emulate others with")


def compile_for(processor: str, monkeypatch: pytest.MonkeyPatch, step: str | None = None) -> None:
    """Have the decoder made as another processor's compiler would, from now on."""
    sources = {native.STEP: step or native.source(native.STEP), native.LAYOUTS: native.source(native.LAYOUTS)}
    compile_otherwise(monkeypatch, {name: PROCESSORS[processor] + source for name, source in sources.items()})


@pytest.fixture
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Lets what is loaded from then on run as on another processor."""
    return lambda: compile_for(request.param, monkeypatch)


def scores(lm):
    """Logits of a prompt, of rows by the number that are multiplied together, alone and in company."""
    whole = lm.score([Row(0, TEXT[:60], 60)])
    for num in (1, 2, 3, 5, 6, 7, 12, 25, 40):
        lm.release(0)
        lm.score([Row(0, TEXT[: 60 - num], 0)])
        found = lm.score([Row(0, TEXT[:60], num), Row(1, [*TEXT[:9], *TEXT[: 3 + num]], 1)])
        assert torch.equal(found[:num], whole[-num:])
        lm.release(1)
    return whole


FORMS = [("float32", "none", 1e-5), ("bfloat16", "none", 0.02), ("bfloat16", "int8", 0.03)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "quantize", "near"), FORMS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("other", PROCESSORS, indirect=True)
def test_49_1_another_processor_s_paths_give_the_same_numbers(
    other, family: str, dtype: str, quantize: Quantize, near: float, tmp_path: Path
) -> None:
    folder = str(make_tiny(family, tmp_path, seed=3, vectors=0.1, **SHAPES.get(family, SHAPE)))
    contexts = [Row(3, TEXT[:20], 6), Row(4, TEXT[:7], 3)]
    oracle = load_lm(folder, dtype=dtype, quantize=quantize)
    expected = scores(oracle)
    draw = Row(5, TEXT[:9], 4, draw=Draw(0.05, 60, 0.9, 0.0, [0.3, 0.8, 0.1, 0.6]))
    expected_draw = oracle.guess([draw], 97)
    other()
    lm = load_lm(folder, dtype=dtype, quantize=quantize)
    found = scores(lm)
    assert float((found - expected).norm() / expected.norm()) < near
    guess = not_none(lm.guess(contexts, 97)).tokens
    for row, tokens in zip(contexts, guess, strict=True):
        text = list(row.context)
        for token in tokens:
            assert int(lm.score([Row(9, text, 1)])[0].argmax()) == token
            text.append(token)
        lm.release(9)
    drawn = lm.guess([draw], 97)
    assert not_none(drawn).tokens == not_none(expected_draw).tokens
    torch.testing.assert_close(not_none(drawn).q[0], not_none(expected_draw).q[0], rtol=1.0, atol=near)


TILE_FAULTS = [
    ("row + size < n; row += 2 * size", "row + size < n; row += 2 * size - (row > 0)"),
    ("x + size * in + p * PACK", "x + (size - 1) * in + p * PACK"),
    ("packs / TILE_PACKS * TILE_PACKS * Kind::PACK; i < in", "0; i < in"),
    ("r < 2 * size && row + r < n", "r < 2 * size && row + r + 1 < n"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "quantize"), [("bfloat16", "none"), ("bfloat16", "int8")])
@pytest.mark.parametrize(("right", "wrong"), TILE_FAULTS)
def test_faults_planted_in_tiles_are_caught(
    dtype: str, quantize: Quantize, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = native.source(native.STEP)
    assert source.count(right) == 1
    folder = str(make_tiny("llama", tmp_path, seed=3, **SHAPE))
    expected = load_lm(folder, dtype=dtype, quantize=quantize).score([Row(0, TEXT[:60], 60)])
    compile_for("AMX", monkeypatch, source.replace(right, wrong))
    lm = load_lm(folder, dtype=dtype, quantize=quantize, check=False)  # which finds some of these faults by itself

    def check() -> None:
        found = scores(lm)
        assert float((found - expected).norm() / expected.norm()) < 0.03

    with pytest.raises(AssertionError):
        check()
