"""One product with a GGUF file's blocks by rows, for each type: from cache, from memory, and memory's own speed.

    python benchmarks/block_products.py [--types Q4_K Q8_0] [--rows 1 2 4 6 8] [--avx2] [--save NAME]

The kernel alone (`block_products.h`), built as the decoder is, on random codes. Nanoseconds are those of a block of 32
inputs for a vector of outputs. "From cache" is one thread; "from memory" two at once, each with a weight of 1 MiB that
was not read lately. The least of many short runs counts: a busy machine disturbs most of them. Where the processor
multiplies four bytes in one instruction, `6 rows over 1, at least` is what that instruction alone would take for six
rows from registers. Where it has tiles, the same without them takes turns with it (A B B A). `--avx2` leaves out what a
processor has beyond AVX2.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from typing import Any

import record
from gguf import GGMLQuantizationType

from specdec_cli.lm.llama import native
from specdec_cli.lm.llama.library import load_library

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
INPUTS = {"legacy": 896, "K": 4864}
SOURCE = """
#include "vectors.h"
namespace {
#include "tiles.h"
#include "block_products.h"
#include "block_tiles.h"

double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}
}

// Nanoseconds of the products of a block with one row by instructions that take four bytes; 0 without these.
extern "C" double in_registers() {
#if HAS_BYTE_PRODUCTS
    constexpr long SUMS_AT_ONCE = 12, TIMES = 1000000;
    double least = INFINITY;
    for (long i = 0; i < 20; i++) {
        Ints sums[SUMS_AT_ONCE] = {};
        const Ints codes = kept(Ints{} + 0x01020304), some = kept(Ints{} + 0x04030201);
        const double begin = seconds();
        for (long t = 0; t < TIMES; t++)
#pragma GCC unroll 12
            for (long s = 0; s < SUMS_AT_ONCE; s++) sums[s] = kept(add_products(sums[s], codes, some));
        least = std::min(least, (seconds() - begin) / double(TIMES * SUMS_AT_ONCE) * BLOCK_INPUTS / 4 * 1e9);
        asm volatile("" : : "r"(&sums[0]) : "memory");
    }
    return least;
#else
    return 0.0;
#endif
}

// Writes the nanoseconds of a block of a panel, from cache and from memory, and the bytes that it takes.
extern "C" void measure(int64_t type, int64_t in, int64_t n, const uint8_t* weights, int64_t size, int64_t runs,
                        double* to) {
    with_layout(type, [&](auto layout) {
        using L = decltype(layout);
        const long num_blocks = in / BLOCK_INPUTS, words = InputRow::words(num_blocks);
        const long bytes = panel_bytes<L>(num_blocks);
        std::vector<float> row(in);
        for (long i = 0; i < in; i++) row[i] = float(i * 7919 % 1000) / 500.0f - 1.0f;
        std::vector<int32_t> x(room_for_inputs(n, in));
        for (long r = 0; r < n; r++) {
            prepare_inputs(row.data(), in, &x[r * words]);
            BlockInputs(x.data(), n, in).tile(r);
        }
        const auto take = [&](int32_t* x, const uint8_t* from, long count) {
            Floats sums[PANEL_ROWS];
            Tiles tiles;
            if (n >= BLOCK_TILES) tiles.shape(group_size(n));
            const double begin = seconds();
            const BlockInputs inputs(x, n, in);
            for (long p = 0; p < count; p++) {
                for (long r = 0; r < n;) r += inputs.multiply<L>(from + p * bytes, r, sums);
                asm volatile("" : : "r"(sums) : "memory");
            }
            return (seconds() - begin) / double(count * num_blocks) * 1e9;
        };
        const long few = std::max(1l, 98304 / bytes), many = std::max(1l, 1048576 / bytes), half = size / 2;
        double cached = INFINITY, read = INFINITY;
        for (long i = 0; i < runs; i++) cached = std::min(cached, take(x.data(), weights, few));
        std::atomic<long> here[2] = {{0}, {0}};
        std::vector<double> each(2 * runs);
#pragma omp parallel num_threads(2)
        {
            const int thread = omp_get_thread_num();
            std::vector<int32_t> own(x);  // which may begin elsewhere in a line of the cache
            for (long r = 0; r < n; r++) BlockInputs(own.data(), n, in).tile(r);
            for (long i = 0; i < runs; i++) {
                here[thread]++;
                for (long looks = 0; here[1 - thread] <= i; looks++)
                    if (looks > 2000) std::this_thread::yield();
                const long place = i * 7 % (half / (many * bytes));
                each[2 * i + thread] = take(own.data(), weights + thread * half + place * many * bytes, many);
            }
        }
        for (long i = 0; i < runs; i++) read = std::min(read, std::max(each[2 * i], each[2 * i + 1]));
        to[0] = cached;
        to[1] = read;
        to[2] = double(bytes) / double(num_blocks);
    });
}
"""


def main() -> None:
    """Measure types by rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=TYPES, choices=TYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 6, 8, 12, 16, 32, 64, 128])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--avx2", action="store_true", help="leave out what is beyond AVX2")
    parser.add_argument("--save", help="name of the result; printed alone without it")
    given = parser.parse_args()
    before = record.machine()
    if given.avx2:
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
    source = native.with_headers(SOURCE).replace("#include <type_traits>", "#include <thread>\n#include <type_traits>")
    options: dict[str, list[str]] = {"": []}
    if "AMX" in before["instructions"] and not given.avx2:
        options["without tiles: "] = ["-U__AMX_TILE__"]
    libraries = {
        label: load_library(source, [*native.command(), *some], may_lack_compiler=False, name="measured-blocks").calls
        for label, some in options.items()
    }
    libraries[""].in_registers.restype = ctypes.c_double
    in_registers = libraries[""].in_registers()
    size = 256 << 20
    weights = (ctypes.c_uint8 * size).from_buffer(bytearray(os.urandom(1 << 20).translate(_ORDINARY) * (size >> 20)))
    results: dict[str, Any] = {"instructions": "AVX2" if given.avx2 else before["instructions"]}
    if in_registers:
        results["a row in registers, ns"] = round(in_registers, 2)
    for name in given.types:
        inputs = INPUTS["K" if name.endswith(("_K", "XS")) else "legacy"]
        found: dict[str, Any] = {}
        for rows in given.rows:
            numbers = (int(GGMLQuantizationType[name]), inputs, rows)
            found[str(rows)] = {}
            turns: dict[str, list[tuple[float, ...]]] = {label: [] for label in libraries}
            for label in [*libraries, *reversed(libraries)]:
                figures = (ctypes.c_double * 3)()
                last = (ctypes.c_int64(size), ctypes.c_int64(given.runs), figures)
                libraries[label].measure(*(ctypes.c_int64(number) for number in numbers), weights, *last)
                turns[label].append(tuple(figures))
            for label, figures_of in turns.items():
                cached, read, num_bytes = map(min, zip(*figures_of, strict=True))
                found[str(rows)] |= {f"{label}cached, ns": round(cached, 1), f"{label}from memory, ns": round(read, 1)}
                found[str(rows)] |= {f"{label}GB/s": round(2 * num_bytes / read, 1)}
        if {1, 6} <= set(given.rows):
            one, six = (found[rows]["from memory, ns"] for rows in ("1", "6"))
            found["6 rows over 1"] = round(six / one, 2)
            if in_registers:
                found["6 rows over 1, at least"] = round(max(1.0, 6 * in_registers / one), 2)
        results[name] = found
        print(name, json.dumps(found), flush=True)
    if given.save:
        record.save(given.save, before, results, 2)


# Bytes without the highest bits of exponents, so that no scale is infinite.
_ORDINARY = bytes(byte & 0x3B for byte in range(256))

if __name__ == "__main__":
    main()
