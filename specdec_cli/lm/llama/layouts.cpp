// How weights lie in memory, for who puts them there.

#include "vectors.h"

namespace {

#include "block_products.h"

}  // namespace

extern "C" {

int64_t panel_outputs() { return PANEL; }
int64_t block_outputs() { return WIDTH; }

// Bytes of a panel of weights in blocks; -1 where a type has no layout.
int64_t block_panel_bytes(int64_t type, int64_t in) {
    int64_t bytes = -1;
    with_layout(type, [&](auto layout) { bytes = panel_bytes<decltype(layout)>(in / BLOCK_INPUTS); });
    return bytes;
}

// Panels of outputs that are rows of a file; `order` [count] names the row of each. Returns how many blocks have a scale that
// is no finite number.
int64_t fill_panels(int64_t type, const uint8_t* rows, const int64_t* order, int64_t count, int64_t in, uint8_t* to) {
    int64_t num_broken = 0;
    with_layout(type, [&](auto layout) {
        using L = decltype(layout);
        const long num_blocks = in / BLOCK_INPUTS;
        for (long begin = 0; begin < count; begin += WIDTH)
            num_broken += fill_panel<L>(rows, order + begin, std::min(WIDTH, long(count) - begin), num_blocks,
                                        to + begin / WIDTH * panel_bytes<L>(num_blocks));
    });
    return num_broken;
}
}
