// Products with weights in blocks, of one processor: a library's call, or a program that reads cases and writes products.

#include "vectors.h"
#include <cstdio>

namespace {
#include "tiles.h"
#include "block_products.h"
#include "block_tiles.h"
}

// Inputs [n, in] times rows of a file: [n, n, outputs], with the rows in groups of 1, 2, … n, which are multiplied together.
extern "C" void multiply(int64_t type, const uint8_t* file, int64_t outputs, const float* inputs, int64_t n, int64_t in,
                         float* to) {
    const long num_blocks = in / BLOCK_INPUTS, words = InputRow::words(num_blocks);
    std::vector<int32_t> x(room_for_inputs(n, in));
    Tiles tiles;
    with_layout(type, [&](auto layout) {
        using L = decltype(layout);
        std::vector<uint8_t> panel(panel_bytes<L>(num_blocks));
        for (long o = 0; o < outputs; o += WIDTH) {
            int64_t order[WIDTH];
            std::iota(order, order + WIDTH, o);
            const long count = std::min(WIDTH, long(outputs) - o);
            fill_panel<L>(file, order, count, in, panel.data());
            for (long size = 1; size <= n; size++)
                for (long r = 0, together; r < n; r += together) {
                    together = std::min(size, long(n) - r);
                    if (together >= BLOCK_TILES) tiles.shape(group_size(together));
                    const BlockInputs some(x.data(), together, in);
                    for (long i = 0; i < together; i++) {
                        prepare_inputs(inputs + (r + i) * in, in, &x[i * words]);
                        some.tile(i);
                    }
                    Floats sums[PANEL_ROWS];
                    for (long i = 0, found; i < together; i += found) {
                        found = some.multiply<L>(panel.data(), i, sums);
                        for (long j = 0; j < found; j++)
                            std::memcpy(to + ((size - 1) * n + r + i + j) * outputs + o, &sums[j], count * sizeof(float));
                    }
                }
        }
    });
}

// How many words behind the room of n rows of `in` inputs are written as these are prepared.
extern "C" int64_t written_behind(int64_t n, int64_t in) {
    constexpr int32_t MARK = 0x5a5a5a5a;
    std::vector<int32_t> x(room_for_inputs(n, in));
    x.resize(x.size() + 4096, MARK);
    const std::vector<float> row(in, 1.0f);
    const BlockInputs inputs(x.data(), n, in);
    for (long r = 0; r < n; r++) {
        prepare_inputs(row.data(), in, &x[r * InputRow::words(blocks_for(in))]);
        inputs.tile(r);
    }
    return 4096 - std::count(x.end() - 4096, x.end(), MARK);
}

int main() {
    for (int64_t sizes[5]; std::fread(sizes, sizeof sizes, 1, stdin);) {  // type, outputs, n, in, bytes of the file
        const auto [type, outputs, n, in, num_bytes] = sizes;
        std::vector<uint8_t> file(num_bytes);
        std::vector<float> inputs(n * in), products(n * n * outputs);
        if (!std::fread(file.data(), num_bytes, 1, stdin) || !std::fread(inputs.data(), n * in * 4, 1, stdin)) return 1;
        multiply(type, file.data(), outputs, inputs.data(), n, in, products.data());
        std::fwrite(products.data(), 4, products.size(), stdout);
    }
}
