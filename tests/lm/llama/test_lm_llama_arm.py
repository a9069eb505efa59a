"""Our own decoder on 64-bit ARM processors, by a cross compiler and an emulator; never on one of them, and never timed.

`block_products.cpp` multiplies there with blocks, bit for bit as the plain C++ does here; `toy_step.cpp` runs a whole
forward.
"""

import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from test_block_products import ALL, FILLS, SOURCE, blocks, library_for, multiply, telling_rows
from test_lm_llama_processors import has_avx2

from specdec_cli.drafters import suffix_index
from specdec_cli.lm.llama import native

COMPILER, EMULATOR, ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64-static", "/usr/aarch64-linux-gnu"
MISSING = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
TOY = Path(__file__).with_name("toy_step.cpp").read_text(encoding="utf-8")
NEON, DOT, MATRIX = "armv8-a", "armv8.2-a+dotprod", "armv8.6-a"
"""Without dot products, with them, and with products of small matrices (i8mm), too."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {' and '.join(MISSING)} (g++-aarch64-linux-gnu, qemu-user-static)"),
    pytest.mark.skipif(not has_avx2(), reason="needs a compiler for x86-64, whose plain C++ is the reference"),
]


def built(source: str, command: Sequence[str], folder: Path) -> Path:
    """A program that a compiler makes of a source."""
    path = folder / "program"
    options = ("-O1", "-x", "c++", "-", "-o", str(path))
    done = subprocess.run([*command, *options], input=source.encode(), stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return path


def emulated(source: str, architecture: str, folder: Path, *options: str) -> list[str]:
    """The command that runs a source as a program on an ARM processor."""
    command = [COMPILER, *native._FLAGS, f"-march={architecture}", *options]
    return [EMULATOR, "-cpu", "max", "-L", ROOT, str(built(source, command, folder))]


def output_of(command: Sequence[str], given: bytes = b"") -> np.ndarray:
    """The numbers that a program writes."""
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.float32)


def check_products(source: str, architecture: str, folder: Path) -> None:
    """Compare all products, in groups of 1 to 9 rows, with those of the plain C++."""
    plain, rows = library_for("no vectors that rounds once"), telling_rows()
    cases = [(name, fill, blocks(name, fill=fill)[0]) for name, fill in itertools.product(ALL, FILLS)]
    given = bytearray()
    for _, _, part in cases:
        given += np.array([part.type, len(part), *rows.shape, part.data.nbytes], np.int64).tobytes()
        given += part.data.tobytes() + rows.numpy().tobytes()
    products = output_of(emulated(source, architecture, folder), bytes(given)).reshape(
        len(cases), len(rows), len(rows), -1
    )
    for (name, fill, part), found in zip(cases, torch.tensor(products), strict=True):
        expected = multiply(plain, part, rows)
        assert fill is not None or (expected != 0).all()
        for together, (of_group, right) in enumerate(zip(found, expected, strict=True), 1):
            assert torch.equal(of_group, right), f"{name} filled with {fill}, {together} rows together"


@pytest.mark.parametrize("architecture", [NEON, DOT, MATRIX])
def test_products_with_blocks_have_the_bits_of_plain_cpp(architecture: str, tmp_path: Path) -> None:
    check_products(SOURCE, architecture, tmp_path)


FAULTS = {
    "packs in another order": (DOT, "codes[p + 1], some, 1)", "codes[p + 1], some, 2)"),
    "signed codes of 8 bits are not": (DOT, "codes[p] ^= 128;", ""),
    "an offset twice": (DOT, "IS_SIGNED ? OFFSET - 128 : OFFSET", "OFFSET"),
    "packs that are skipped": (DOT, "p < PACKS; p += 4", "p + 4 < PACKS || !p; p += 4"),
    "low and high codes exchanged": (NEON, "PLACE - pack % SHARED * NUM", "PLACE - (SHARED - 1 - pack % SHARED) * NUM"),
    "another table": (NEON, "vld1q_u8(values)", "vld1q_u8(values + 1)"),
    "factors without a sign": (
        NEON,
        "vreinterpret_s8_s32(vdup_n_s32(four)))",
        "vreinterpret_s8_s32(vdup_n_s32(four & 0x7f7f7f7f)))",
    ),
    "sums of one half": (NEON, "vmull_high_s16(one, other));", "vmull_s16(vget_low_s16(one), vget_low_s16(other)));"),
    "lanes in another order": (MATRIX, "vzip2q_s32(one, next)", "vzip1q_s32(one, next)"),
    "a row is its neighbour": (MATRIX, "vuzp2q_s32(low, high)", "vuzp1q_s32(low, high)"),
    "a second row's inputs of the first": (MATRIX, "vld1_s8(second + 4 * p)", "vld1_s8(second + 4 * (p & 4))"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_planted_in_products_are_caught(fault: str, tmp_path: Path) -> None:
    architecture, right, wrong = FAULTS[fault]
    assert SOURCE.count(right) == 1
    with pytest.raises(AssertionError, match="rows together"):
        check_products(SOURCE.replace(right, wrong), architecture, tmp_path)


@pytest.mark.parametrize(
    ("weights", "number", "architecture", "near"),
    [
        ("Float32", "float", NEON, 1e-5),
        ("BFloat16", "uint16_t", NEON, 0.02),
        *(("Int8", "uint16_t", architecture, 0.02) for architecture in (NEON, DOT)),
        *(("Blocks", "float", architecture, 0.002) for architecture in (NEON, DOT, MATRIX)),
        ("Blocks", "uint16_t", MATRIX, 0.02),
    ],
)
def test_a_forward_gives_the_numbers_of_this_processor(
    weights: str, number: str, architecture: str, near: float, tmp_path: Path
) -> None:
    source, options = native.source(native.STEP) + TOY, (f"-DWEIGHTS={weights}", f"-DNUMBER={number}")
    (tmp_path / "here").mkdir()
    expected = output_of([str(built(source, [*native.command(), *options], tmp_path / "here"))])
    found = output_of(emulated(source, architecture, tmp_path, *options))
    assert 0.1 < expected.std() < 20
    assert np.linalg.norm(found - expected) < near * np.linalg.norm(expected)


@pytest.mark.parametrize("architecture", [NEON, MATRIX])
def test_the_other_sources_compile(architecture: str) -> None:
    for source in (native.source(native.LAYOUTS), suffix_index._SOURCE.read_text(encoding="utf-8")):
        command = [COMPILER, *native._FLAGS, f"-march={architecture}", "-fsyntax-only", "-x", "c++", "-"]
        subprocess.run(command, input=source.encode(), check=True)


@pytest.mark.parametrize("name", [native.STEP, native.LAYOUTS])
def test_sources_compile_where_int64_t_is_a_long_long(name: str) -> None:
    """As on macOS."""
    source = native.source(name).replace(
        "namespace {", "typedef long long Int64;\n#define int64_t Int64\nnamespace {", 1
    )
    options = ("-DWEIGHTS=Blocks", "-DNUMBER=uint16_t", "-fsyntax-only", "-")
    subprocess.run([*native.command(), *options], input=source.encode(), check=True)
