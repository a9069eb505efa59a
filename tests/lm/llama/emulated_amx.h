// The tiles (AMX) that the decoder multiplies with, in plain C++, behind emulated_avx512.h.
namespace emulated {

struct Tile {
    alignas(64) uint8_t rows[16][64];
    int num_rows, num_bytes;
};

inline Tile* tiles() {
    static thread_local Tile all[8];
    return all;
}

inline void configure(const void* from) {
    const uint8_t* const bytes = (const uint8_t*)from;
    for (int tile = 0; tile < 8; tile++) {
        uint16_t num_bytes;
        std::memcpy(&num_bytes, bytes + 16 + 2 * tile, 2);
        tiles()[tile].num_bytes = num_bytes;
        tiles()[tile].num_rows = bytes[48 + tile];
    }
}

inline void zero(int tile) { std::memset(tiles()[tile].rows, 0, sizeof tiles()[tile].rows); }

inline void read_tile(int tile, const void* from, long pitch) {
    Tile& to = tiles()[tile];
    for (int r = 0; r < to.num_rows; r++) std::memcpy(to.rows[r], (const char*)from + r * pitch, to.num_bytes);
}

inline void write_tile(int tile, void* to, long pitch) {
    const Tile& from = tiles()[tile];
    for (int r = 0; r < from.num_rows; r++) std::memcpy((char*)to + r * pitch, from.rows[r], from.num_bytes);
}

template <class Sum, class Left, class Right, class Times>
inline void multiply_tiles(int sums, int left, int right, Times times) {
    Tile& to = tiles()[sums];
    const Tile &a = tiles()[left], &b = tiles()[right];
    constexpr int PACK = 4 / sizeof(Left);
    for (int r = 0; r < to.num_rows; r++)
        for (int o = 0; o < to.num_bytes / 4; o++) {
            Sum& sum = ((Sum*)to.rows[r])[o];
            for (int p = 0; p < b.num_rows; p++)
                for (int i = 0; i < PACK; i++)
                    sum += times(((const Left*)a.rows[r])[p * PACK + i], ((const Right*)b.rows[p])[o * PACK + i]);
        }
}

inline void dpbf16_tiles(int sums, int left, int right) {
    multiply_tiles<float, uint16_t, uint16_t>(sums, left, right, [](uint16_t a, uint16_t b) { return bf16(a) * bf16(b); });
}

template <class Left, class Right>
inline void dpb_tiles(int sums, int left, int right) {
    multiply_tiles<int32_t, Left, Right>(sums, left, right, [](Left a, Right b) { return int32_t(a) * b; });
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated::configure(from)
#define _tile_release() (void)0
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, pitch) emulated::read_tile(tile, from, pitch)
#define _tile_stored(tile, to, pitch) emulated::write_tile(tile, to, pitch)
#define _tile_dpbf16ps(sums, left, right) emulated::dpbf16_tiles(sums, left, right)
#define _tile_dpbusd(sums, left, right) emulated::dpb_tiles<uint8_t, int8_t>(sums, left, right)
#define _tile_dpbsud(sums, left, right) emulated::dpb_tiles<int8_t, uint8_t>(sums, left, right)
#define _tile_dpbssd(sums, left, right) emulated::dpb_tiles<int8_t, int8_t>(sums, left, right)
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
