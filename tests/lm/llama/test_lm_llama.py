"""Our own decoder: transformers' forward is its oracle, and what it does not know goes through transformers."""

import platform
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted import compile_otherwise, plant
from tiny_engine import PROMPTS, decode, tokens
from tiny_models import make_tiny
from typed import not_none, stand_in

from specdec_cli.drafted import NOTHING
from specdec_cli.errors import RunError
from specdec_cli.lm import invariance
from specdec_cli.lm.cache.memory import Arena
from specdec_cli.lm.door import Draw, Row
from specdec_cli.lm.invariance import row_invariance
from specdec_cli.lm.llama import llama_weights, native
from specdec_cli.lm.llama.library import BuildError
from specdec_cli.lm.load import load_lm
from specdec_cli.recipe.values import Quantize
from specdec_cli.sampling.chain import ChainRow, distribution
from specdec_cli.sampling.params import SamplingParams

TEXT = [(11 * i * i + 3 * i) % 97 for i in range(100)]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
KNOWN = {
    "llama": ("llama", {}),
    "without groups": ("llama", {"num_key_value_heads": 4}),
    "one key head, tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "attention bias": ("qwen2", {}),
    "head norms": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": None}),
}
UNKNOWN = {
    "activation": ("llama", {"hidden_act": "gelu"}, "activation `gelu`"),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rotary type `dynamic`",
    ),
    "another family": ("starcoder2", {}, "architecture `Starcoder2ForCausalLM`"),
    "clipped": ("olmoe", {"clip_qkv": 3.0}, "clipped queries, keys and values"),
}


def score(lm):
    """Logits of a prompt, plain steps, verification, and a batch in which one sequence is cut back."""
    parts = [
        lm.score([Row(0, TEXT[:50], 3)]),
        lm.score([Row(0, TEXT[:51], 1)]),
        lm.score([Row(0, TEXT[:56], 5), Row(1, TEXT[:9], 2)]),
        lm.score([Row(1, TEXT[:10], 1), Row(0, [*TEXT[:52], 7, 8], 3), Row(2, TEXT[10:85], 1)]),
        lm.score([Row(0, [*TEXT[:52], 7], 1)]),
    ]
    for handle in range(3):
        lm.release(handle)
    return torch.cat(parts)


@pytest.fixture(params=KNOWN)
def folder(request: pytest.FixtureRequest, tmp_path: Path):
    family, shape = KNOWN[request.param]
    return str(make_tiny(family, tmp_path, seed=3, **stand_in(shape)))


def test_float32_logits_and_tokens_are_those_of_transformers(folder) -> None:
    own, theirs = load_lm(folder), load_lm(folder, decoder="transformers")
    assert own.decoder_obstacle is None
    assert theirs.decoder_obstacle == "it is disabled"
    assert torch.allclose(score(own), score(theirs), atol=2e-4, rtol=1e-4)
    params = SamplingParams(max_new_tokens=24)
    expected = tokens(decode(theirs, None, 0, params=params))
    assert len(set(expected[0])) > 4
    assert tokens(decode(own, None, 0, params=params)) == expected
    assert tokens(decode(own, load_lm(folder), 4, params=params)) == expected
    assert tokens(decode(own, "ngram", 3, PROMPTS[:1], params)) == expected[:1]


def test_bfloat16_is_as_close_to_float32_as_transformers(folder) -> None:
    exact = score(load_lm(folder))
    own = (score(load_lm(folder, dtype="bfloat16")) - exact).square().mean()
    theirs = (score(load_lm(folder, dtype="bfloat16", decoder="transformers")) - exact).square().mean()
    assert own <= 1.5 * theirs


def test_built_in_pair() -> None:
    for name in ("builtin:target", "builtin:draft"):
        own, theirs = load_lm(name), load_lm(name, decoder="transformers")
        assert own.decoder_obstacle is None
        assert torch.allclose(score(own), score(theirs), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_it_does_not_know_goes_through_transformers(case, tmp_path: Path) -> None:
    family, shape, words = UNKNOWN[case]
    lm = load_lm(str(make_tiny(family, tmp_path, **stand_in(shape))))
    assert words in not_none(lm.decoder_obstacle)
    assert lm.score([Row(0, TEXT[:9], 2)]).shape == (2, 97)


def test_the_model_is_left_with_shapes_and_no_memory(tmp_path: Path) -> None:
    lm = load_lm(str(make_tiny("llama", tmp_path)))
    products = [p for name, p in lm.model.named_parameters() if p.dim() > 1]
    assert {p.device.type for p in products} == {"meta"}
    assert lm.weight_bytes == sum(p.numel() * p.element_size() for p in lm.model.parameters())
    assert lm.dtype == torch.float32
    assert lm.device.type == "cpu"


def test_many_small_writes_and_long_forwards(tmp_path: Path) -> None:
    """More rows than one tile takes, each with pieces of its own."""
    folder = str(make_tiny("llama", tmp_path))
    own, theirs = (load_lm(folder, decoder=decoder, max_num_seqs=12) for decoder in ("auto", "transformers"))
    rows = [Row(i, TEXT[i : i + 3 + i], 2) for i in range(12)]
    assert len(rows) > 8
    for dtype_free in range(2):
        longer = [Row(row.handle, [*row.context, *TEXT[: 2 * dtype_free]], 1 + dtype_free) for row in rows]
        assert torch.allclose(own.score(longer), theirs.score(longer), atol=2e-4, rtol=1e-4)


def test_callers_may_write_into_logits(tmp_path: Path) -> None:
    logits = load_lm(str(make_tiny("llama", tmp_path))).score([Row(0, TEXT[:9], 2)])
    logits[0, 0] = 1.0
    assert not logits.is_inference()


@pytest.mark.in_turn(0, every=3)
@pytest.mark.parametrize("fault", ["mask", "rotation", "pairs"])
def test_a_planted_fault_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    folder = str(make_tiny("llama", tmp_path, seed=3))
    right = score(load_lm(folder, decoder="transformers"))
    if fault == "mask":
        plant(monkeypatch, "a query sees the token behind it")
    elif fault == "rotation":
        turn = torch.complex
        monkeypatch.setattr(torch, "complex", lambda cosines, sines: turn(cosines, -sines))
    else:
        monkeypatch.setattr(llama_weights, "_pair_order", lambda shape: torch.arange(shape.head_size))
    assert not torch.allclose(score(load_lm(folder, check=False)), right, atol=1e-2)


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
def test_a_row_has_the_same_bits_in_any_company(tmp_path: Path, dtype: str, quantize: Quantize) -> None:
    """Sizes that no vector divides, and a part of the outputs for each of two to four threads."""
    shape = {"hidden_size": 88, "intermediate_size": 150, "num_attention_heads": 4, "head_dim": 22}
    lm = load_lm(str(make_tiny("llama", tmp_path, **shape)), dtype=dtype, quantize=quantize)
    whole = lm.score([Row(0, TEXT[:60], 60)])
    before = torch.get_num_threads()
    try:
        for num_rows, num_threads in product((1, 2, 3, 5, 6, 7, 12, 25), (1, 2, 3, 4)):
            torch.set_num_threads(num_threads)
            lm.release(0)
            lm.score([Row(0, TEXT[: 60 - num_rows], 0)])
            company = Row(1, [*TEXT[:9], *TEXT[: 3 + num_rows]], 1)
            found = lm.score([Row(0, TEXT[:60], num_rows), company])
            assert torch.equal(found[:num_rows], whole[-num_rows:])
            lm.release(1)
    finally:
        torch.set_num_threads(before)


def one_by_one(lm, row, num_tokens):
    found: list[Any] = []
    for _ in range(row.num_logits):
        found.append(int(lm.score([Row(row.handle, [*row.context, *found], 1)])[0, :num_tokens].argmax()))
    return found


@pytest.mark.in_turn(1)
@pytest.mark.parametrize("num_tokens", [97, 40])
def test_continuations_are_those_that_scores_give_one_by_one(folder, num_tokens: int) -> None:
    """New sequences, such as go on after some of a guess stood, and lengths of all kinds beside each other."""
    lm, other = load_lm(folder, block_size=4), load_lm(folder, block_size=4)
    contexts = {handle: TEXT[7 * handle : 9 * handle + 5] for handle in range(5)}
    for counts in ((3, 1, 8, 2, 1), (1, 1, 1, 1, 1), (6, 5, 4, 3, 2)):
        rows = [Row(handle, contexts[handle], count) for handle, count in enumerate(counts)]
        found = not_none(lm.guess(rows, num_tokens)).tokens
        assert found == [one_by_one(other, row, num_tokens) for row in rows]
        assert len({token for one in found for token in one}) > 2
        lm.check_integrity()
        contexts = {row.handle: [*row.context, *one[: row.handle], 5] for row, one in zip(rows, found, strict=True)}


def drawn_one_by_one(lm, row, num_tokens):
    """The same row's tokens by the sampling chain from scores, and what they were drawn from."""
    draw, found, q = row.draw, [], []
    params = SamplingParams(temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p, min_p=draw.min_p)
    for uniform in draw.uniforms:
        context = [*row.context, *found]
        logits = lm.score([Row(row.handle, context, 1)])
        p = distribution(logits, [ChainRow(params, context, len(context), NOTHING, frozenset())], num_tokens)
        found.append(int(p.sample(torch.tensor([uniform], dtype=torch.float64))))
        q.append(p.dense())
    return found, torch.cat(q)


CUTS = {
    "nothing cut": (0.05, None, 1.0, 0.0),
    "top-k": (0.2, 7, 1.0, 0.0),
    "top-k of all": (0.05, 97, 1.0, 0.0),
    "top-p of few": (0.02, None, 0.8, 0.0),
    "top-p of many": (1.0, None, 0.95, 0.0),
    "top-p within top-k": (0.5, 20, 0.7, 0.0),
    "min-p": (0.1, None, 1.0, 0.3),
    "all of them": (0.2, 12, 0.9, 0.2),
    "one is left": (1.0, None, 1e-9, 0.0),
    "hardly any temperature": (1e-45, None, 1.0, 0.0),
}
OF_FEW_TOKENS = ("nothing cut", "top-k of all", "all of them")


@pytest.mark.in_turn(2, every=4)
@pytest.mark.parametrize(
    ("folder", "cut", "num_tokens"),
    [
        pytest.param(
            *(case, cut, num),
            marks=() if (i + j) % 4 == 0 and (num == 97 or cut in OF_FEW_TOKENS) else pytest.mark.slow,
        )
        for num in (97, 40)
        for i, cut in enumerate(CUTS)
        for j, case in enumerate(KNOWN)
    ],
    indirect=["folder"],
)
def test_drawn_continuations_are_those_of_the_sampling_chain(folder, cut, num_tokens: int) -> None:
    """Beside one of likeliest tokens, and one that is drawn otherwise."""
    noise = torch.rand(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)).tolist()
    noise[0][:3] = 2.0**-53, 1 - 2.0**-53, 0.5
    draws = [Draw(*CUTS[cut], noise[0]), None, Draw(*CUTS[cut], noise[1]), Draw(0.05, None, 1.0, 0.0, noise[2][:2])]
    rows = [Row(i, TEXT[7 * i : 9 * i + 5], 2 if i == 3 else 8, draw=draw) for i, draw in enumerate(draws)]
    other = load_lm(folder)
    found = load_lm(folder).guess(rows, num_tokens)
    assert not_none(found).q.keys() == {0, 2, 3}
    for place, row in enumerate(rows):
        if row.draw is None:
            assert not_none(found).tokens[place] == one_by_one(other, row, num_tokens)
            continue
        tokens, q = drawn_one_by_one(other, row, num_tokens)
        assert not_none(found).tokens[place] == tokens
        assert torch.equal(not_none(found).q[place] > 1e-36, q > 1e-36)
        torch.testing.assert_close(not_none(found).q[place], q, rtol=2e-5, atol=1e-9)


def test_a_drawn_token_has_a_probability(folder) -> None:
    """Even by the smallest number, where the first tokens of the vocabulary have next to none."""
    rows = [Row(0, TEXT[:5], 4, draw=Draw(0.01, None, 1.0, 0.0, [0.0] * 4))]
    found = load_lm(folder).guess(rows, 97)
    q = not_none(found).q[0]
    assert (q == 0).any()
    assert (q[range(4), not_none(found).tokens[0]] > 0).all()
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(4))


def set_embedding(lm, token, value) -> None:
    """Make a token's embedding something else, in our own decoder's panels."""
    tokens = torch.arange(97, dtype=lm.dtype)[:, None].expand(-1, lm.config.hidden_size)
    with torch.inference_mode():
        is_its = llama_weights.panels(tokens, llama_weights.half_of(len(tokens)), Arena()) == token
        lm._forward._embedding.weight[is_its] = value


def test_a_continuation_ends_where_the_numbers_do(tmp_path: Path) -> None:
    folder = str(make_tiny("llama", tmp_path))
    whole = not_none(load_lm(folder).guess([Row(0, TEXT[:9], 6), Row(1, TEXT[:4], 6)], 97)).tokens
    lm = load_lm(folder)
    set_embedding(lm, whole[0][2], torch.nan)
    first, second = not_none(lm.guess([Row(0, TEXT[:9], 6), Row(1, TEXT[:4], 6)], 97)).tokens
    assert whole[0][2] not in whole[1][:5]
    assert first == whole[0][:3]
    assert second == whole[1]
    drawn = lm.guess([Row(3, TEXT[:9], 6, draw=Draw(1e-3, None, 1.0, 0.0, [0.5] * 6))], 97)
    assert not_none(drawn).tokens == [whole[0][:3]]
    assert not_none(drawn).q[0].shape == (3, 97)
    set_embedding(lm, 0, torch.inf)
    assert not_none(lm.guess([Row(2, [0], 2)], 97)).tokens == [[]]
    assert load_lm(folder, decoder="transformers").guess([Row(0, TEXT[:9], 6)], 97) is None


def test_norms_that_add_nothing_run(tmp_path: Path) -> None:
    assert load_lm(str(make_tiny("llama", tmp_path, rms_norm_eps=0.0))).decoder == "own"


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
def test_what_is_no_number_stays_none(tmp_path: Path, dtype: str, quantize: Quantize) -> None:
    lm = load_lm(str(make_tiny("llama", tmp_path)), dtype=dtype, quantize=quantize)
    set_embedding(lm, 7, torch.nan)
    assert not lm.score([Row(0, [7], 1)]).isfinite().any()
    assert lm.score([Row(1, [8], 1)]).isfinite().all()


@pytest.mark.slow
def test_a_row_that_follows_its_company_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "a row is another one in company")
    monkeypatch.setattr("specdec_cli.lm.invariance._block_arms", lambda _: [])  # the next test's
    found = [check for check in invariance._decoder_checks(torch.float32) if "own decoder" in check.kernel]
    assert found
    assert not any(check.holds for check in found)


@pytest.mark.slow
def test_a_row_of_blocks_that_follows_its_company_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ("write<ADDS>(m, sums[r], o,", "write<ADDS>(m, (count > 1 ? 1.01f : 1.0f) * sums[r], o,"))
    checks = {check.kernel: check.holds for check in row_invariance(torch.float32) if "own decoder" in check.kernel}
    in_blocks = {kernel for kernel in checks if "int4" in kernel or "blocks" in kernel}
    assert len(in_blocks) == 4
    assert {kernel for kernel, holds in checks.items() if not holds} == in_blocks


def test_where_there_is_no_compiler_transformers_runs_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(make_tiny("llama", tmp_path, seed=3))
    right = score(load_lm(folder))
    monkeypatch.setattr(native, "missing", lambda: "no C++ compiler `g++`")
    lm = load_lm(folder)
    assert lm.decoder == "transformers"
    assert lm.decoder_obstacle == "no C++ compiler `g++`"
    assert torch.allclose(score(lm), right, atol=2e-4, rtol=1e-4)


@pytest.fixture
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was built before is not found."""
    native._built.cache_clear()
    yield
    native._built.cache_clear()


def test_a_kind_of_weights_that_does_not_compile_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lays weights out was built; the forward is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compile_otherwise(monkeypatch, {native.STEP: "int forward( {"})
    folder = str(make_tiny("llama", tmp_path, seed=3))
    with pytest.raises(RunError, match=r"our own decoder cannot run: its own does not compile: .*error"):
        load_lm(folder)


@pytest.mark.usefixtures("_anew")
class TestBuilding:
    @pytest.mark.slow
    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of such processors")
    @pytest.mark.parametrize(
        "without",
        ["-mno-avx512f", "-mno-avx512f -mno-fma", "-mno-avx512bf16 -mno-avx512vnni", "-U__AMX_TILE__"],
    )
    def test_older_processors(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without: str) -> None:
        compile_otherwise(monkeypatch, {})
        monkeypatch.setenv("CXX", f"g++ {without}")
        folder = str(make_tiny("llama", tmp_path, seed=3, hidden_size=88, head_dim=22))
        forms: list[tuple[str, Quantize, float]] = [
            ("float32", "none", 2e-4),
            ("bfloat16", "none", 0.2),
            ("float32", "int8", 0.2),
        ]
        for dtype, quantize, tolerance in forms:
            own = load_lm(folder, dtype=dtype, quantize=quantize)
            theirs = load_lm(folder, dtype=dtype, quantize=quantize, decoder="transformers")
            assert own.decoder_obstacle is None
            assert torch.allclose(score(own), score(theirs), atol=tolerance, rtol=tolerance)
        monkeypatch.setattr(
            "specdec_cli.lm.invariance._block_arms", lambda dtype: []
        )  # test_block_products has older processors
        with torch.inference_mode():
            found = [check for dtype in (torch.float32, torch.bfloat16) for check in invariance._decoder_checks(dtype)]
        assert [check.holds for check in found] == [True] * 8

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="the variable is about such processors")
    @pytest.mark.parametrize(("named", "has"), [("avx2", ("__AVX2__", "__FMA__")), ("default", ())])
    def test_torchs_variable_names_an_older_processor(
        self, monkeypatch: pytest.MonkeyPatch, named: str, has: tuple[str, ...]
    ) -> None:
        """What the compiler says of its instructions; nothing is built."""
        seen: list[list[str]] = []

        def load(_, command, **__):
            seen.append([*command])
            raise BuildError("asked", "nothing")

        monkeypatch.setattr(native, "load_library", load)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", named)
        assert native.missing() == "asked"
        defined = subprocess.run(
            [*seen[0], "-dM", "-E", "/dev/null"], capture_output=True, text=True, check=True
        ).stdout
        assert "__AVX512F__" not in defined
        for name in ("__AVX2__", "__FMA__"):
            assert name in has or f"{name} " not in defined

    @pytest.mark.parametrize(
        ("system", "has_products", "option"),
        [
            ("linux", 0, "-mcpu=native"),
            ("darwin", 0, "-march=armv8.4-a+dotprod"),
            ("darwin", 1, "-march=armv8.4-a+dotprod+i8mm"),
        ],
    )
    def test_arm_has_the_option_of_its_system(
        self, monkeypatch: pytest.MonkeyPatch, system: str, has_products: int, option: str
    ) -> None:
        def sysctlbyname(name: bytes, value: Any, *_: Any) -> None:
            value._obj.value = has_products if name == b"hw.optional.arm.FEAT_I8MM" else 1 - has_products

        monkeypatch.setattr(native.ctypes, "CDLL", lambda _: SimpleNamespace(sysctlbyname=sysctlbyname))
        monkeypatch.setattr(native.platform, "machine", lambda: "aarch64" if system == "linux" else "arm64")
        monkeypatch.setattr(native.sys, "platform", system)
        assert native.flags()[-1] == option

    def test_what_was_built_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert native.missing() is None
        (built,) = (tmp_path / "specdec").glob("*.so")
        made = built.stat().st_mtime_ns
        native._built.cache_clear()
        native.layouts()
        assert built.stat().st_mtime_ns == made

    @pytest.mark.slow
    def test_a_cache_that_cannot_be_written_is_no_obstacle(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert native.missing() is None

    @pytest.mark.slow
    def test_no_home_is_no_obstacle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def home() -> None:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(native.Path, "home", home)
        assert native.missing() is None

    def test_a_missing_compiler_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler -O2")
        assert native.missing() == "no C++ compiler `no-such-compiler`"
        assert "or name one with CXX" in not_none(native.remedy(native.missing()))
        assert native.remedy("architecture `GPT2LMHeadModel`") is None

    def test_a_source_that_does_not_compile_is_said_with_the_compilers_words(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(native, "source", lambda _: "int forward( {")
        assert "does not compile" in not_none(native.missing())
        assert "error" in not_none(native.missing())


@pytest.mark.parametrize(
    ("num_outputs", "unit", "half"),
    [(160, 1, 80), (432, 1, 208), (480, 32, 224), (97, 1, 48), (2048, 128, 1024), (30, 1, 0)],
)
def test_two_threads_have_equally_many_outputs(num_outputs: int, unit: int, half: int) -> None:
    """To a narrow panel or a head; each half has panels of its own."""
    assert llama_weights.half_of(num_outputs, unit) == half
    weight = torch.arange(num_outputs, dtype=torch.float32)[:, None]
    laid_out = llama_weights.panels(weight, half, Arena())
    assert laid_out[:half].sort().values.equal(weight[:half, 0])
