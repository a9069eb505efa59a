"""Products with weights in a GGUF file's blocks: right, a row's own in any company, the same on every processor."""

import ctypes
import itertools
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from shortened import mostly_slow
from test_lm_llama_processors import PROCESSORS, has_avx2

from specdec_cli.lm.cache.memory import Arena
from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.caller import Caller
from specdec_cli.lm.llama.file_rows import FileRows, has_layout
from specdec_cli.lm.llama.library import load_library
from specdec_cli.lm.llama.llama_weights import Matrix
from specdec_cli.lm.llama.model_fields import ModelFields, matrix_fields

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"]
PLAIN_TYPES = ["F32", "F16", "BF16"]
K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
ALL = [*TYPES, *K_TYPES, *PLAIN_TYPES]
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}  # bytes of a block's 16-bit numbers
_SCALES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
_INPUTS, _OUTPUTS = 512, 40
pytestmark = pytest.mark.skipif(native.missing() is not None, reason="no compiler")


def blocks(type_name, seed=0, fill=None):
    """Random bytes as a weight's blocks, or the same everywhere, with scales of an ordinary size; and its numbers."""
    kind = Type[type_name]
    if type_name in PLAIN_TYPES:
        return plain_rows(kind, seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    whole = random.integers(0, 256, (_OUTPUTS, _INPUTS // size, num_bytes), dtype=np.uint8)
    if fill is not None:
        whole[:] = fill
    for place in _SCALES.get(type_name, (0,)):
        scales = random.standard_normal((*whole.shape[:2], 1)).astype(np.float16)
        if fill is not None:
            scales[::3] *= np.float16(2**-20)  # as small as 16 bits have them
        whole[:, :, place : place + 2] = scales.view(np.uint8)
    if type_name == "MXFP4":  # exponents
        whole[:, :, 0] = random.integers(110, 140, whole.shape[:2])
    data = np.ascontiguousarray(whole.reshape(_OUTPUTS, -1))
    return FileRows(type_name, "file", int(kind), _INPUTS, data, torch.arange(_OUTPUTS)), gguf.quants.dequantize(
        data, kind
    )


def plain_rows(kind, seed):
    """Random numbers of many magnitudes as a weight's rows; F16 has no exponent for some of them."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal((_OUTPUTS, _INPUTS)) * 10.0 ** random.integers(-7, 3, (_OUTPUTS, _INPUTS))
    data = gguf.quants.quantize(numbers.astype(np.float32), kind).view(np.uint8)
    return FileRows(kind.name, "file", int(kind), _INPUTS, data, torch.arange(_OUTPUTS)), gguf.quants.dequantize(
        data, kind
    )


def packed(parts, bias, arena):
    """A matrix of a file's rows as the decoder has it."""
    matrix = Matrix.of_rows(parts, bias, arena)
    matrix.fill()
    return matrix


def product(matrix, rows):
    """Rows [n, in] times a matrix: [n, out]."""
    caller = Caller("blocks", torch.float32)
    head = matrix_fields(matrix)
    caller.model = ModelFields(head=head, hidden=_INPUTS, num_heads=1, num_key_heads=1, num_taken=1)
    logits = torch.empty(len(rows), matrix.num_outputs)
    caller.reserve(len(rows), len(rows), 0, logits.data_ptr())
    caller.run(caller.library.head, rows.data_ptr())
    return logits


def quantized(rows, size):
    """Rows as the decoder multiplies them: whole numbers with a scale for so many."""
    parts = rows.view(len(rows), -1, size)
    scales = parts.abs().amax(-1, keepdim=True) / 127
    return ((parts / scales + 128.5).floor() - 128).mul(scales).view(rows.shape)


def some_rows(n):
    return torch.randn(n, _INPUTS, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, n)[:, None]


@pytest.mark.parametrize("name", ALL)
def test_numbers_are_those_of_the_file(name):
    part, numbers = blocks(name)
    matrix, found, places = (
        packed([part], None, Arena()),
        torch.empty(_OUTPUTS, _INPUTS),
        torch.arange(_OUTPUTS),
    )
    fields = ctypes.byref(ModelFields()), ctypes.byref(matrix_fields(matrix))
    native.step("Blocks", is_half=False).plain_rows(*fields, places.data_ptr(), _OUTPUTS, found.data_ptr())
    assert torch.equal(found, torch.from_numpy(numbers))


@pytest.mark.parametrize("name", ALL)
def test_a_product_is_that_of_the_numbers(name):
    part, numbers = blocks(name)
    rows = some_rows(5)
    found = product(packed([part], torch.ones(_OUTPUTS), Arena()), rows)
    right = quantized(rows.double(), part.scale_inputs) @ torch.from_numpy(numbers).double().t() + 1
    assert torch.allclose(found.double(), right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("name", ALL)
def test_a_row_has_its_bits_in_any_company_and_order(name):
    part, _ = blocks(name)
    other, _ = blocks("Q8_0", seed=1)
    order = torch.randperm(_OUTPUTS, generator=torch.Generator().manual_seed(2))[:32]
    rows = some_rows(13)
    whole = product(packed([part], None, Arena()), rows)
    for begin, end in ((0, 1), (3, 5), (2, 7), (4, 11), (1, 13)):
        mixed = packed([part[order], other], None, Arena())
        assert torch.equal(product(mixed, rows[begin:end].contiguous())[:, :32], whole[begin:end, order])


def many_rows():
    """Rows of all magnitudes, as many as meet a panel in several turns where there are tiles."""
    return torch.cat([some_rows(10) for _ in range(15)])[
        torch.randperm(150, generator=torch.Generator().manual_seed(3))
    ]


@pytest.mark.parametrize("name", ALL)
def test_a_row_has_its_bits_among_many(name):
    part, _ = blocks(name)
    other, _ = blocks("Q4_K" if name == "Q6_K" else "Q6_K", seed=1)
    rows = many_rows()
    mixed = packed([part[torch.arange(32)], other], None, Arena())
    whole = torch.cat([product(mixed, row[None]) for row in rows])
    for num in (9, 15, 16, 17, 33, 49, 121, 129, 150):
        assert torch.equal(product(mixed, rows[:num]), whole[:num]), num


SOURCE = native.with_headers(Path(__file__).with_name("block_products.cpp").read_text(encoding="utf-8"))
FILLS = (None, 0, 127, 128, 255)


def multiply(library, part, rows):
    """Products of some rows, with 1, 2, … n of them together, as a library of SOURCE computes them: [n, n, out]."""
    found = torch.empty(len(rows), len(rows), len(part))
    addresses = (part.data.ctypes.data, len(part), rows.data_ptr(), len(rows), _INPUTS, found.data_ptr())
    library.multiply(*(ctypes.c_int64(number) for number in (part.type, *addresses)))
    return found


def library_for(processor, source=SOURCE):
    """A source as a library for a processor of PROCESSORS."""
    command = [*native.compiler(), *(flag.replace("-O3", "-O0") for flag in native.flags()), "-x", "c++"]
    return load_library(PROCESSORS.get(processor, "") + source, command, may_lack_compiler=False, name="blocks").calls


def telling_rows():
    """Rows of many magnitudes, one too small to be scaled up, and some of the largest whole numbers alone."""
    tiny = some_rows(1).clamp(-1, 1) * 1e-38
    return torch.cat((some_rows(6), tiny, torch.full((1, _INPUTS), 3.0), torch.full((1, _INPUTS), -3.0)))


@pytest.mark.skipif(not has_avx2(), reason="no AVX2 to emulate others with")
@pytest.mark.parametrize("processor", mostly_slow(PROCESSORS, ["AVX2"]))
def test_every_processor_has_the_same_bits(processor):
    here, other, rows = library_for("this one"), library_for(processor), telling_rows()
    rounds_once = "no vectors" != processor != "AVX2 without FMA"
    for name, fill in itertools.product(ALL, FILLS):
        part, _ = blocks(name, fill=fill)
        right, found = multiply(here, part, rows)[0], multiply(other, part, rows)
        room = torch.zeros(()) if rounds_once else right.abs().amax(1, keepdim=True) * 1e-5
        assert ((found - right).abs() <= room).all(), (name, fill)
    if processor == "AMX":  # more of them than a tile has
        many = many_rows()[:20]
        for name, fill in itertools.product(K_TYPES, FILLS):
            part, _ = blocks(name, fill=fill)
            assert torch.equal(multiply(other, part, many), multiply(here, part, many)), (name, fill)
    if processor == "AVX2":
        part, _ = blocks("Q4_K")
        assert torch.equal(multiply(here, part, rows)[0], product(packed([part], None, Arena()), rows))


@pytest.mark.parametrize("processor", mostly_slow(["this one", *(["AMX"] if has_avx2() else [])], ["this one"]))
def test_inputs_of_any_width_have_room(processor):
    """Where tiles read them, too: widths of as many blocks as super-blocks have, which are not whole ones."""
    library = library_for(processor)
    for num_rows, width in itertools.product((9, 600, 1346), (32, 200, 225, 226, 255, 256, 481, 511, 512, 896)):
        assert library.written_behind(ctypes.c_int64(num_rows), ctypes.c_int64(width)) == 0, (num_rows, width)


TILE_FAULTS = {
    "a high byte's place": ("found[group + 1][place] << 8", "found[group + 1][place] << 7"),
    "a unit's inputs": ("x += num_rows", "x += num_rows - 1"),
    "the second group": ("others = some + size", "others = some + size - 1"),
    "the offset": ("(__m512i)odd) - taken", "(__m512i)odd)"),
    "the low bytes' sign": ("_tile_dpbsud(2, 5, 6)", "_tile_dpbssd(2, 5, 6)"),
    "a tile's weights": ("_tile_loadd(7, high + p, 64)", "_tile_loadd(7, high + p / 2, 64)"),
}


@pytest.mark.slow
@pytest.mark.skipif(not has_avx2(), reason="no AVX2 to emulate others with")
@pytest.mark.parametrize("fault", TILE_FAULTS)
def test_faults_planted_in_tiles_of_blocks_are_caught(fault):
    right, wrong = TILE_FAULTS[fault]
    assert SOURCE.count(right) == 1
    faulty, rows = library_for("AMX", SOURCE.replace(right, wrong)), many_rows()[:20]
    part, _ = blocks("Q6_K")
    found = multiply(faulty, part, rows)
    assert torch.equal(found[:8], multiply(library_for("this one"), part, rows)[:8])
    assert not torch.equal(found[-1], found[0])


def test_a_type_without_a_layout_is_told():
    assert has_layout(int(Type.Q4_K))
    assert not has_layout(int(Type.IQ1_S))


@pytest.mark.slow
def test_the_benchmark_measures_a_type():
    script = Path(__file__).parents[3] / "benchmarks" / "block_products.py"
    words = ["--types", "Q8_0", "--rows", "1", "6", "--runs", "2"]
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.startswith('Q8_0 {"1": {"cached, ns": ')
    assert '"6 rows over 1": ' in done.stdout


@pytest.mark.skipif(not has_avx2(), reason="no x86-64 with AVX2")
@pytest.mark.parametrize("named", ["avx2", "default"])
def test_an_older_processor_has_no_tiles(named, monkeypatch: pytest.MonkeyPatch):
    """On a processor that has them, either: their instructions come with those that it lacks."""
    monkeypatch.setenv("CXX", "g++ -D__AMX_TILE__=1")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", named)
    command = [*native.command(), "-dM", "-E", "/dev/null"]
    defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "__SSE2__" in defined
    assert "__AMX_TILE__" not in defined
