// Where a processor multiplies whole tiles (AMX), 16 rows meet 16 outputs and 16 packs of their inputs at once. From so many
// rows on: sums of bfloat16 round otherwise there, so it is all or none; whole numbers are the same, and fewer go sooner
// through vectors.
constexpr long NEVER = INT64_MAX;
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
constexpr long BFLOAT16_TILES = 1;
#else
constexpr long BFLOAT16_TILES = NEVER;
#endif
#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__)
#define HAS_INT8_TILES 1
constexpr long INT8_TILES = 7;
#else
#define HAS_INT8_TILES 0
constexpr long INT8_TILES = NEVER;
#endif

// Rows that are multiplied as tiles, in groups of equal size; a last one may reach into what fills it.
constexpr long TILE_ROWS = 16, TILE_PACKS = 16;
inline long groups_of(long n) { return (n + TILE_ROWS - 1) / TILE_ROWS; }
inline long group_size(long n) { return n ? (n + groups_of(n) - 1) / groups_of(n) : 0; }

#if defined(__AMX_TILE__)
// A thread's tiles while it multiplies: 0 to 3 are sums, 4 and 5 rows of inputs, 6 and 7 weights.
class Tiles {
    long size = 0;

public:
    void shape(long rows) {
        if (rows == size || !rows) return;
        // Volatile: compilers take this for a reading of its first bytes alone.
        alignas(64) volatile uint8_t of[64] = {1};
        for (int tile = 0; tile < 8; tile++) {
            of[16 + 2 * tile] = 64;  // bytes of a row
            of[48 + tile] = uint8_t(tile < 6 ? rows : TILE_PACKS);
        }
        _tile_loadconfig((const void*)of);
        size = rows;
    }
    ~Tiles() {
        if (size) _tile_release();
    }
};

// One of V tiles of a panel of W outputs, early: near lines, without which a processor waits for most of them, and what is
// farther to a larger cache. Called between the tiles that are loaded, and not unrolled: many in one go wait for each other.
template <int V, long W, int TILE_OF_V>
inline void fetch_tile(const void* tiles) {
#pragma GCC unroll 1
    for (long line = TILE_OF_V * TILE_PACKS; line < (TILE_OF_V + 1) * TILE_PACKS; line++) {
        const char* const from = (const char*)tiles + line / V * 4 * W + line % V * 64;
        __builtin_prefetch(from + AHEAD);
        __builtin_prefetch(from + 4 * AHEAD, 0, 2);
    }
}

inline void begin_sums() {
    std::atomic_signal_fence(std::memory_order_seq_cst);  // inputs are written: compilers do not see tiles read them
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

#define SPECDEC_TILED(sums, rows, weights) \
    if constexpr (sizeof(*w) == 2) _tile_dpbf16ps(sums, rows, weights); \
    else _tile_dpbusd(sums, rows, weights)

// A group of rows, `in` inputs of each, times V tiles of outputs of a panel of W; sums go to [rows, 4, TILE_ROWS].
template <int V, long W, class Weight, class Input>
inline void multiply_group(const Weight* w, const Input* x, long in, long packs, void* sums) {
    constexpr long PACK = 4 / sizeof(Weight), PITCH = 4 * W;
    constexpr long NEXT = TILE_ROWS * PACK;
    begin_sums();
    for (long p = 0; p + TILE_PACKS <= packs; p += TILE_PACKS) {
        const Weight* const from = w + p * W * PACK;
        _tile_loadd(4, x + p * PACK, in * sizeof(Input));
        fetch_tile<V, W, 0>(from);
        _tile_loadd(6, from, PITCH);
        SPECDEC_TILED(0, 4, 6);
        if constexpr (V > 1) {
            fetch_tile<V, W, 1>(from);
            _tile_loadd(7, from + NEXT, PITCH);
            SPECDEC_TILED(1, 4, 7);
        }
        if constexpr (V > 2) {
            fetch_tile<V, W, 2>(from);
            _tile_loadd(6, from + 2 * NEXT, PITCH);
            SPECDEC_TILED(2, 4, 6);
            fetch_tile<V, W, 3>(from);
            _tile_loadd(7, from + 3 * NEXT, PITCH);
            SPECDEC_TILED(3, 4, 7);
        }
    }
    char* const to = (char*)sums;
    _tile_stored(0, to, 256);
    if constexpr (V > 1) _tile_stored(1, to + 64, 256);
    if constexpr (V > 2) {
        _tile_stored(2, to + 128, 256);
        _tile_stored(3, to + 192, 256);
    }
}

// Two groups of `size` rows at once, each times V tiles of outputs, one or two; sums as above, of one group after another.
template <int V, long W, class Weight, class Input>
inline void multiply_groups(const Weight* w, const Input* x, long size, long in, long packs, void* sums) {
    constexpr long PACK = 4 / sizeof(Weight), PITCH = 4 * W;
    begin_sums();
    for (long p = 0; p + TILE_PACKS <= packs; p += TILE_PACKS) {
        const Weight* const from = w + p * W * PACK;
        _tile_loadd(4, x + p * PACK, in * sizeof(Input));
        _tile_loadd(5, x + size * in + p * PACK, in * sizeof(Input));
        fetch_tile<V, W, 0>(from);
        _tile_loadd(6, from, PITCH);
        SPECDEC_TILED(0, 4, 6);
        SPECDEC_TILED(2, 5, 6);
        if constexpr (V > 1) {
            fetch_tile<V, W, 1>(from);
            _tile_loadd(7, from + TILE_ROWS * PACK, PITCH);
            SPECDEC_TILED(1, 4, 7);
            SPECDEC_TILED(3, 5, 7);
        }
    }
    char *const to = (char*)sums, *const other = to + size * 256;
    _tile_stored(0, to, 256);
    _tile_stored(2, other, 256);
    if constexpr (V > 1) {
        _tile_stored(1, to + 64, 256);
        _tile_stored(3, other + 64, 256);
    }
}
#undef SPECDEC_TILED
#else
struct Tiles {
    void shape(long) {}
};
#endif
