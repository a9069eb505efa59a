// How weights lie in memory, for who puts them there.

#include "vectors.h"

namespace {

#include "block_products.h"

uint16_t half_of_float(float value) {  // the nearest, of two the even one; what is no number or too large is no finite one
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (bits < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(std::fabs(value) * 0x1p24f)));
    return uint16_t(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
}

// Makes a block, as a file holds it, of `count` numbers: codes of 4 bits from the least number on (Q4_1), or of 8 bits with a
// sign (Q8_0), by the scale as 16 bits have it.
void quantize_block(bool is_int8, const float* numbers, long count, uint8_t* to) {
    float least = numbers[0], most = numbers[0];
    bool is_finite = true;
    for (long i = 0; i < count; i++) {
        least = numbers[i] < least ? numbers[i] : least;
        most = numbers[i] > most ? numbers[i] : most;
        is_finite &= std::fabs(numbers[i]) <= std::numeric_limits<float>::max();
    }
    const float span = is_int8 ? std::max(-least, most) / 127.0f : (most - least) / 15.0f;
    const uint16_t bits[2] = {is_finite ? half_of_float(span) : uint16_t(0x7c00), half_of_float(least)};
    std::memcpy(to, bits, is_int8 ? 2 : 4);
    to += is_int8 ? 2 : 4;
    const float scale = float_of_half(bits[0]), by = scale > 0.0f ? 1.0f / scale : 0.0f;
    const float from = is_int8 ? 0.0f : float_of_half(bits[1]), low = is_int8 ? -127.0f : 0.0f, high = is_int8 ? 127.0f : 15.0f;
    int8_t codes[BLOCK_INPUTS] = {};
    for (long i = 0; i < count; i++) codes[i] = int8_t(std::floor(std::min(std::max((numbers[i] - from) * by, low), high) + 0.5f));
    if (is_int8) std::memcpy(to, codes, BLOCK_INPUTS);
    else for (long i = 0; i < BLOCK_INPUTS / 2; i++) to[i] = uint8_t(codes[i] | codes[i + BLOCK_INPUTS / 2] << 4);
}

}  // namespace

extern "C" {

int64_t panel_outputs() { return PANEL; }
int64_t block_outputs() { return WIDTH; }

// Bytes of a panel of weights in blocks; -1 where a type has no layout.
int64_t block_panel_bytes(int64_t type, int64_t in) {
    int64_t bytes = -1;
    with_layout(type, [&](auto layout) { bytes = panel_bytes<decltype(layout)>(blocks_for(in)); });
    return bytes;
}

// Rows [count, in] as blocks of a type, Q4_1 or Q8_0, as a file holds them.
void quantize_rows(int64_t type, const float* rows, int64_t count, int64_t in, uint8_t* to) {
    const bool is_int8 = type == Q8_0::ID;
    for (long row = 0; row < count; row++, rows += in)
        for (long begin = 0; begin < in; begin += BLOCK_INPUTS, to += is_int8 ? file_bytes<Q8_0>() : file_bytes<Q4_1>())
            quantize_block(is_int8, rows + begin, std::min(BLOCK_INPUTS, long(in) - begin), to);
}

// Panels of outputs that are rows of a file; `order` [count] names the row of each. Returns how many blocks have a scale that
// is no finite number, or how many plain numbers are not.
int64_t fill_panels(int64_t type, const uint8_t* rows, const int64_t* order, int64_t count, int64_t in, uint8_t* to) {
    int64_t num_broken = 0;
    with_layout(type, [&](auto layout) {
        using L = decltype(layout);
        for (long begin = 0; begin < count; begin += WIDTH)
            num_broken += fill_panel<L>(rows, order + begin, std::min(WIDTH, long(count) - begin), in,
                                        to + begin / WIDTH * panel_bytes<L>(blocks_for(in)));
    });
    return num_broken;
}

// Likewise of rows [count, in] that stay in their file.
int64_t broken_blocks(int64_t type, const uint8_t* rows, int64_t count, int64_t in) {
    int64_t num_broken = 0;
    with_layout(type, [&](auto layout) { num_broken = broken_blocks<decltype(layout)>(rows, count, in); });
    return num_broken;
}
}
