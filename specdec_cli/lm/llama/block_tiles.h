// Rows of inputs that meet panels of blocks. Of a K type many rows do so as tiles, where there are any: they meet whole
// numbers, which are codes times their blocks' scales in two bytes, so that the sums are those of `multiply_panel`.

// A row's inputs of a super-block, beside those of other rows, because tiles read many rows at once.
struct alignas(64) TiledInputs : InputSuper {};

#if HAS_INT8_TILES
constexpr long BLOCK_TILES = 9;             // rows from which on tiles are sooner than vectors
constexpr long PANEL_ROWS = 8 * TILE_ROWS;  // that meet a panel together at most
constexpr long SUPER_PACKS = SUPER_INPUTS / 4;

// The weights of a super-block, in units of its scale: packs of their low bytes, which have no sign, and of the high ones.
template <class L>
inline void split_weights(const uint8_t* head, Codes* low, Codes* high) {
    using G = Group<L>;
    const uint8_t* codes = head + L::HEAD_BYTES;
    for (long b = 0; b < SUPER_BLOCKS; b++, codes += L::CODE_BYTES) {
        fetch<L>(codes, 0, 1);
#pragma GCC unroll 2
        for (int g = 0; g < G::COUNT; g++, low += G::PACKS, high += G::PACKS) {
            const Ints by = ints_of_bytes(head + L::factor_at(b * L::HALVES + (L::HALVES == 2 ? g : 0), false));
            const Ints even = (by & 0xff) | (by << 16 & 0xff0000), odd = even << 8;
            const Shorts taken = (Shorts)joined(by, by) * int16_t(L::PRODUCT_OFFSET);
            G group;
            group.read(codes, g * G::PACKS);
#pragma GCC unroll 8
            for (int p = 0; p < G::PACKS; p++) {
                const Shorts first = (Shorts)_mm512_maddubs_epi16((__m512i)group.codes[p], (__m512i)even) - taken;
                const Shorts second = (Shorts)_mm512_maddubs_epi16((__m512i)group.codes[p], (__m512i)odd) - taken;
                low[p] = (Codes)((first & 0xff) | second << 8);
                high[p] = (Codes)((first >> 8 & 0xff) | (second & int16_t(0xff00)));
            }
        }
    }
}

// Some rows, in groups of `size` as the tiles are, of inputs that have `num_rows` in each of their units.
template <class L>
__attribute__((noinline)) void multiply_tiled(const uint8_t* panel, const TiledInputs* x, long num_rows, long n, long size,
                                              long num_units, Floats* to) {
    constexpr long PITCH = sizeof(TiledInputs);
    alignas(64) Codes low[SUPER_PACKS], high[SUPER_PACKS];
    alignas(64) Ints found[4][TILE_ROWS];
    for (long r = 0; r < n; r++) to[r] = Floats{};
    for (long unit = 0; unit < num_units; unit++, panel += L::UNIT_BYTES, x += num_rows) {
        split_weights<L>(panel, low, high);
        const Floats scales = L::scales(panel);
        for (long row = 0; row < n; row += 2 * size) {
            const TiledInputs *const some = x + row, *const others = some + size;
            const bool has_others = row + size < n;
            begin_sums();
            for (long p = 0; p < SUPER_PACKS; p += TILE_PACKS) {
                _tile_loadd(4, some->codes + 4 * p, PITCH);
                _tile_loadd(6, low + p, 64);
                _tile_dpbsud(0, 4, 6);
                _tile_loadd(7, high + p, 64);
                _tile_dpbssd(1, 4, 7);
                if (!has_others) continue;
                _tile_loadd(5, others->codes + 4 * p, PITCH);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            _tile_stored(0, found[0], 64);
            _tile_stored(1, found[1], 64);
            _tile_stored(2, found[2], 64);
            _tile_stored(3, found[3], 64);
            const long count = std::min(2 * size, n - row);
            if constexpr (L::HAS_MINIMUM) {
                Ints none[2 * TILE_ROWS];  // codes have no offset
                take_sums<L>(panel, some, PITCH / 4, count, none, *(Floats(*)[2 * TILE_ROWS])(to + row));
            }
            for (long r = 0; r < count; r++) {
                const long group = r < size ? 0 : 2, place = r < size ? r : r - size;
                const Ints whole = found[group][place] + (found[group + 1][place] << 8);
                to[row + r] = multiply_add(__builtin_convertvector(whole, Floats), scales * spread(some[r].scale), to[row + r]);
            }
        }
    }
}
#else
constexpr long BLOCK_TILES = NEVER, PANEL_ROWS = BLOCK_ROWS;
#endif

// Words that rows of inputs take, or fewer: one after another, and behind them what tiles read of each super-block.
inline long room_for_inputs(long n, long in) {
    const long tiled = BLOCK_TILES < NEVER ? n * (in / SUPER_INPUTS) + TILE_ROWS + 1 : 0;
    return n * (2 * in + 64) + tiled * sizeof(TiledInputs) / 4;
}

// Rows of `in` inputs, which have their room; they meet one panel after another.
class BlockInputs {
    int32_t* const x;
    const long n, num_blocks, num_supers, words;

    TiledInputs* tiled() const { return (TiledInputs*)((uintptr_t(x + n * words) + 63) / 64 * 64); }

public:
    BlockInputs(int32_t* x, long n, long in)
        : x(x), n(n), num_blocks(blocks_for(in)), num_supers(in % SUPER_INPUTS ? 0 : in / SUPER_INPUTS),
          words(InputRow::words(num_blocks)) {}

    // Puts a row's super-blocks beside those of the other rows, once it is prepared.
    void tile(long r) const {
        if (n < BLOCK_TILES) return;
        const InputRow row(x + r * words, num_blocks);
        for (long unit = 0; unit < num_supers; unit++) (InputSuper&)tiled()[unit * n + r] = row.supers[unit];
    }

    // Sums of a panel and the rows from `row` on; returns of how many.
    template <class L>
    long multiply(const uint8_t* panel, long row, Floats (&sums)[PANEL_ROWS]) const {
#if HAS_INT8_TILES
        if constexpr (L::IS_SUPER)
            if (n >= BLOCK_TILES) {
                const long size = group_size(n), count = std::min(n - row, PANEL_ROWS / TILE_ROWS * size);
                multiply_tiled<L>(panel, tiled() + row, n, count, size, num_supers, sums);
                return count;
            }
#endif
        const long count = std::min(n - row, BLOCK_ROWS);
        multiply_rows<L>(panel, x + row * words, words, count, num_blocks, sums);
        return count;
    }
};
