// Products with weights as GGUF files hold them: blocks of 32 inputs, whose codes share a scale and perhaps a minimum, and
// plain numbers of 16 or 32 bits.
//
// A panel holds as many outputs as a vector has lanes, block after block, so that a product reads it from front to back and
// nothing is summed across lanes: every instruction set adds the same numbers in the same order. Inputs are whole numbers
// with a scale for each block; where blocks are of a K type, for each eight, in which everything is added up as whole
// numbers; where weights are plain numbers, inputs are not rounded. In this file W is WIDTH, the lanes of a vector.

constexpr long BLOCK_INPUTS = 32, SUPER_BLOCKS = 8, SUPER_INPUTS = SUPER_BLOCKS * BLOCK_INPUTS;

inline long blocks_for(long in) { return (in + BLOCK_INPUTS - 1) / BLOCK_INPUTS; }  // the last one may have room left

// A block of a row's inputs.
struct InputBlock {
    int8_t codes[BLOCK_INPUTS];
    float scale;
    float sum;         // of the inputs as the codes tell them
    int32_t taken[3];  // less the sum of the codes times each of OFFSETS
};

constexpr int OFFSETS[3] = {8, 16, 128};  // of types without scales of their own inside of a block

// Eight of them with one scale.
struct InputSuper {
    int8_t codes[SUPER_INPUTS];
    float scale;
    int16_t sums[SUPER_BLOCKS];           // of each block's codes
    int16_t half_sums[2 * SUPER_BLOCKS];  // of each half's
};

// A row's inputs: its blocks, its super-blocks where it is whole ones, and the inputs themselves.
struct InputRow {
    const InputBlock* blocks;
    const InputSuper* supers;
    const float* numbers;

    InputRow(const int32_t* words, long num_blocks)
        : blocks((const InputBlock*)words), supers((const InputSuper*)(blocks + num_blocks)),
          numbers((const float*)(supers + num_supers(num_blocks))) {}

    static long num_supers(long num_blocks) { return num_blocks % SUPER_BLOCKS ? 0 : num_blocks / SUPER_BLOCKS; }

    // Of a row.
    static long words(long num_blocks) {
        const long rounded = num_blocks * sizeof(InputBlock) + num_supers(num_blocks) * sizeof(InputSuper);
        return rounded / 4 + num_blocks * BLOCK_INPUTS;
    }
};

typedef uint8_t Codes __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));  // 4 inputs of each lane

inline float float_of_half(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    uint32_t wide;
    if (rest >= 0x7c00) wide = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) wide = (rest << 13) + 0x38000000;
    else {
        const float small = float(rest) * 0x1p-24f;
        std::memcpy(&wide, &small, 4);
    }
    wide |= sign;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline Floats floats_of_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#else
    Floats values;
    for (long i = 0; i < WIDTH; i++) {
        uint16_t bits;
        std::memcpy(&bits, from + 2 * i, 2);
        values[i] = float_of_half(bits);
    }
    return values;
#endif
}

struct Half {
    uint16_t bits;
};
inline float float_of(Half value) { return float_of_half(value.bits); }
inline Floats floats_of(const Half* from) { return floats_of_halves((const uint8_t*)from); }

inline Ints ints_of_bytes(const uint8_t* from) {  // which have a sign
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif defined(__aarch64__)
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return (Ints)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
#else
    Ints values;
    for (long i = 0; i < WIDTH; i++) values[i] = int8_t(from[i]);
    return values;
#endif
}

// Two whole numbers of each lane as halves of its 32 bits, and the sums of products of such halves.
inline Ints joined(Ints low, Ints high) { return (low & 0xffff) | high << 16; }

inline Ints products_of_halves(Ints a, Ints b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__aarch64__)
    const int16x8_t one = (int16x8_t)a, other = (int16x8_t)b;
    return (Ints)vpaddq_s32(vmull_s16(vget_low_s16(one), vget_low_s16(other)), vmull_high_s16(one, other));
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// What the codes of IQ4 types and of MXFP4 mean, 128 and 16 more.
constexpr uint8_t IQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool HAS_SIGNED_CODES = true;  // in products, to which codes of 8 bits go less 128
#else
constexpr bool HAS_SIGNED_CODES = false;
#endif

// How a type of block lies in a panel. Of a block: a scale of 16 bits for each lane, a minimum where it has one, and codes of
// BITS each: first what is above the LOW bits of all of them, and then these, because the high ones are read with each of the
// low ones. Some packs of four inputs share a byte's bits. Codes, or the values of a table that they stand for, have OFFSET
// for 0. Blocks of a K type have scales, and minimums, of a byte for each of HALVES, which stand before all eight of them and
// behind the 16 bits that multiply them.
template <int TYPE, int BITS_, int OFFSET_, bool HAS_MINIMUM_, int HALVES_ = 0, const uint8_t* VALUES_ = nullptr>
struct Layout {
    static constexpr bool IS_PLAIN = false;
    static constexpr int ID = TYPE, BITS = BITS_, OFFSET = OFFSET_, LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2;
    static constexpr int VALUE_BITS = VALUES_ == IQ4 ? 8 : VALUES_ == FP4 ? 5 : BITS;
    static constexpr bool IS_SIGNED = HAS_SIGNED_CODES && VALUE_BITS == 8;
    static constexpr int PRODUCT_OFFSET = IS_SIGNED ? OFFSET - 128 : OFFSET;  // what products' codes have for 0
    static constexpr const uint8_t* VALUES = VALUES_;
    static constexpr bool IS_SUPER = HALVES_ > 0, HAS_MINIMUM = HAS_MINIMUM_;
    static constexpr bool IS_BFLOAT16 = VALUES == FP4;  // the scale, which has no fraction
    static constexpr int TAKEN = OFFSET == OFFSETS[0] ? 0 : OFFSET == OFFSETS[1] ? 1 : 2;
    static constexpr int HALVES = IS_SUPER ? HALVES_ : 1, NUM_FACTORS = SUPER_BLOCKS * HALVES;
    static constexpr long CODE_BYTES = WIDTH * BLOCK_INPUTS * BITS / 8, HIGH_BYTES = WIDTH * BLOCK_INPUTS * (BITS - LOW) / 8;
    static constexpr long HEAD_BYTES = WIDTH * (1 + HAS_MINIMUM) * (2 + (IS_SUPER ? NUM_FACTORS : 0));
    static constexpr long UNIT_BLOCKS = IS_SUPER ? SUPER_BLOCKS : 1;  // behind a head
    static constexpr long UNIT_BYTES = HEAD_BYTES + UNIT_BLOCKS * CODE_BYTES;

    // Where a head has lane 0's 16 bits of the scale or minimum, and its bytes of those of a block or half.
    static constexpr long bits_at(bool is_minimum) { return is_minimum ? 2 * WIDTH : 0; }
    static constexpr long factor_at(long factor, bool is_minimum) {
        return WIDTH * (2 * (1 + HAS_MINIMUM) + factor + (is_minimum ? NUM_FACTORS : 0));
    }

    static Floats scales(const uint8_t* head) {
        return IS_BFLOAT16 ? floats_of((const uint16_t*)head) : floats_of_halves(head);
    }
    static Floats minimums(const uint8_t* head) {
        return HAS_MINIMUM ? floats_of_halves(head + bits_at(true)) : Floats{};
    }
};

// Plain numbers: of each input that of each lane. A number that is not finite has all bits of EXPONENT.
template <int TYPE, class Number_, class Bits_, Bits_ EXPONENT_>
struct Plain {
    using Number = Number_;
    using Bits = Bits_;
    static constexpr bool IS_PLAIN = true, IS_SUPER = false;
    static constexpr int ID = TYPE;
    static constexpr Bits EXPONENT = EXPONENT_;
    static constexpr long UNIT_BLOCKS = 1, UNIT_BYTES = WIDTH * BLOCK_INPUTS * sizeof(Number);
};

using F32 = Plain<0, float, uint32_t, 0x7f800000>;
using F16 = Plain<1, Half, uint16_t, 0x7c00>;
using BF16 = Plain<30, uint16_t, uint16_t, 0x7f80>;
using Q4_0 = Layout<2, 4, 8, false>;
using Q4_1 = Layout<3, 4, 0, true>;
using Q5_0 = Layout<6, 5, 16, false>;
using Q5_1 = Layout<7, 5, 0, true>;
using Q8_0 = Layout<8, 8, 128, false>;
using Q2_K = Layout<10, 2, 0, true, 2>;
using Q3_K = Layout<11, 3, 4, false, 2>;
using Q4_K = Layout<12, 4, 0, true, 1>;
using Q5_K = Layout<13, 5, 0, true, 1>;
using Q6_K = Layout<14, 6, 32, false, 2>;
using IQ4_NL = Layout<20, 4, 128, false, 0, IQ4>;
using IQ4_XS = Layout<23, 4, 128, false, 1, IQ4>;
using MXFP4 = Layout<39, 4, 16, false, 0, FP4>;

// Calls work with the layout of a type; false where there is none.
template <class Work>
inline bool with_layout(int64_t type, Work work) {
    const auto try_each = [&](auto... layouts) { return ((layouts.ID == type && (work(layouts), true)) || ...); };
    return try_each(F32(), F16(), BF16(), Q4_0(), Q4_1(), Q5_0(), Q5_1(), Q8_0(), Q2_K(), Q3_K(), Q4_K(), Q5_K(), Q6_K(),
                    IQ4_NL(), IQ4_XS(), MXFP4());
}

template <class L>
inline long panel_bytes(long num_blocks) {
    return num_blocks / L::UNIT_BLOCKS * L::UNIT_BYTES;
}

// ---- Codes of a panel ----------------------------------------------------------------------------------------------

inline Codes codes_at(const uint8_t* from) {
    Codes codes;
    std::memcpy(&codes, from, sizeof codes);
    return codes;
}

inline Codes looked_up(Codes codes, const uint8_t* values) {  // 16 of them
#if defined(__AVX512BW__)
    return (Codes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values)), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values)), (__m256i)codes);
#elif defined(__aarch64__)
    return (Codes)vqtbl1q_u8(vld1q_u8(values), (uint8x16_t)codes);
#else
    for (long i = 0; i < 4 * WIDTH; i++) codes[i] = values[codes[i]];
    return codes;
#endif
}

// ---- Sums of products of codes and inputs --------------------------------------------------------------------------

#if HAS_BYTE_PRODUCTS
constexpr bool HAS_LONG_SUMS = true;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool HAS_LONG_SUMS = false;  // but sums of 16 bits, which are multiplied with a scale as they are made longer
#if defined(__AVX512BW__)
inline Ints pairs_of(Codes codes, Ints inputs) { return (Ints)_mm512_maddubs_epi16((__m512i)codes, (__m512i)inputs); }
#else
inline Ints pairs_of(Codes codes, Ints inputs) { return (Ints)_mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs); }
#endif
#else
constexpr bool HAS_LONG_SUMS = true;
#endif

#if defined(__ARM_FEATURE_DOTPROD)
// A row's inputs times packs, four and four of them.
template <int PACKS>
inline Ints sums_of_row(const Codes (&codes)[PACKS], const int8_t* inputs) {
    int32x4_t sums = {};
    for (int p = 0; p < PACKS; p += 4) {
        const int8x16_t some = vld1q_s8(inputs + 4 * p);
        sums = vdotq_laneq_s32(sums, (int8x16_t)codes[p], some, 0);
        sums = vdotq_laneq_s32(sums, (int8x16_t)codes[p + 1], some, 1);
        sums = vdotq_laneq_s32(sums, (int8x16_t)codes[p + 2], some, 2);
        sums = vdotq_laneq_s32(sums, (int8x16_t)codes[p + 3], some, 3);
    }
    return (Ints)sums;
}
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Likewise those of two rows: eight inputs of both meet those of two lanes at once.
template <int PACKS>
inline void sums_of_two(const Codes (&codes)[PACKS], const int8_t* first, const int8_t* second, Ints (&sums)[2]) {
    int32x4_t low = {}, high = {};  // each of two lanes, of both rows
    for (int p = 0; p < PACKS; p += 2) {
        const int8x16_t both = vcombine_s8(vld1_s8(first + 4 * p), vld1_s8(second + 4 * p));
        const int32x4_t one = (int32x4_t)codes[p], next = (int32x4_t)codes[p + 1];
        low = vmmlaq_s32(low, (int8x16_t)vzip1q_s32(one, next), both);
        high = vmmlaq_s32(high, (int8x16_t)vzip2q_s32(one, next), both);
    }
    sums[0] = (Ints)vuzp1q_s32(low, high);
    sums[1] = (Ints)vuzp2q_s32(low, high);
}
#endif

constexpr long BLOCK_ROWS = HAS_LONG_SUMS ? 8 : 16;  // that meet a panel together at most

// The same of another row, so many words from here.
template <class Some>
inline const Some* beside(const Some* of, long words) { return (const Some*)((const int32_t*)of + words); }

// Codes of some packs of a block, kept in registers while rows of inputs meet them.
template <class L>
struct Group {
    // Without long sums, 8 bits are multiplied as twice 4.
    static constexpr bool IS_SPLIT = !HAS_LONG_SUMS && L::VALUE_BITS == 8;
    static constexpr int PACKS = L::HALVES == 2 || IS_SPLIT ? 4 : 8, COUNT = 8 / PACKS;  // the latter of a block
    Codes codes[PACKS], high[PACKS];
    Ints by;  // what sums are multiplied with, in K types

    // Packs first … first + PACKS - 1 of a block's codes.
    void read(const uint8_t* from, int first) {
#pragma GCC unroll 8
        for (int p = 0; p < PACKS; p++) {
            codes[p] = code_at(from, first + p);
            if constexpr (L::IS_SIGNED) codes[p] ^= 128;
            if constexpr (IS_SPLIT) {
                high[p] = (Codes)((Shorts)codes[p] >> 4) & 15;
                codes[p] &= 15;
            }
        }
    }

    static Codes code_at(const uint8_t* from, int pack) {
        const Codes code = bits_of<L::LOW, 0>(from + L::HIGH_BYTES, pack);
        if constexpr (L::VALUES != nullptr) return looked_up(code, L::VALUES);
        if constexpr (L::BITS > L::LOW) return code | bits_of<L::BITS - L::LOW, L::LOW>(from, pack);
        return code;
    }

    // NUM bits of each code of a pack, as those from PLACE on.
    template <int NUM, int PLACE>
    static Codes bits_of(const uint8_t* from, int pack) {
        constexpr int SHARED = 8 / NUM;
        const Codes all = codes_at(from + pack / SHARED * 4 * WIDTH);
        const int shift = PLACE - pack % SHARED * NUM;
        const Codes moved = shift < 0 ? (Codes)((Shorts)all >> -shift) : (Codes)((Shorts)all << shift);
        return NUM == 8 ? all : moved & uint8_t(((1 << NUM) - 1) << PLACE);
    }

    // Adds sums of products with R rows' inputs of these packs, times `by` in K types.
    template <int R>
    void multiply(const int8_t* inputs, long pitch, Ints (&whole)[R]) const {
#if HAS_BYTE_PRODUCTS
        Ints sums[R];
        for (int r = 0; r < R; r++) sums[r] = L::IS_SUPER ? Ints{} : whole[r];
#pragma GCC unroll 8
        for (int p = 0; p < PACKS; p++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Ints some = spread_bits(beside(inputs, r * pitch) + 4 * p);
                sums[r] = add_products(sums[r], (Ints)codes[p], some);
            }
        for (int r = 0; r < R; r++) whole[r] = L::IS_SUPER ? whole[r] + sums[r] * by : sums[r];
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
        // 16 bits hold eight sums of two products with 4 bits (8 · 2 · 15 · 127), four with 5 and two with 6.
        constexpr int EVERY = L::VALUE_BITS == 5 ? 4 : L::VALUE_BITS == 6 ? 2 : PACKS;
        const Ints factor = L::IS_SUPER ? by : Ints{} + 0x10001, factor_above = (Ints)((Shorts)factor << 4);
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int begin = 0; begin < PACKS; begin += EVERY) {
                Shorts low = {}, above = {};
#pragma GCC unroll 8
                for (int p = begin; p < begin + EVERY; p++) {
                    const Ints some = spread_bits(beside(inputs, r * pitch) + 4 * p);
                    low += (Shorts)pairs_of(codes[p], some);
                    if constexpr (IS_SPLIT) above += (Shorts)pairs_of(high[p], some);
                }
                whole[r] += products_of_halves((Ints)low, factor);
                if constexpr (IS_SPLIT) whole[r] += products_of_halves((Ints)above, factor_above);
            }
        }
#elif defined(__ARM_FEATURE_DOTPROD)
        int r = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC unroll 4
        for (; r + 2 <= R; r += 2) {
            Ints sums[2];
            sums_of_two(codes, beside(inputs, r * pitch), beside(inputs, (r + 1) * pitch), sums);
            for (int i = 0; i < 2; i++) whole[r + i] += L::IS_SUPER ? sums[i] * by : sums[i];
        }
#endif
#pragma GCC unroll 8
        for (; r < R; r++) {
            const Ints sums = sums_of_row(codes, beside(inputs, r * pitch));
            whole[r] += L::IS_SUPER ? sums * by : sums;
        }
#else
        for (int r = 0; r < R; r++) {
            const int8_t* const row = beside(inputs, r * pitch);
            Ints sums = {};
            for (long i = 0; i < WIDTH; i++)
                for (long j = 0; j < 4 * PACKS; j++) sums[i] += int32_t(codes[j / 4][4 * i + j % 4]) * row[j];
            whole[r] += L::IS_SUPER ? sums * by : sums;
        }
#endif
    }
};

// Asks for what the group has that comes later: busy with several rows, a processor reads too little ahead by itself. Zen 4
// is asked for more, further ahead, which its second cache holds.
template <class L>
inline void fetch(const uint8_t* codes, long part, long parts) {
    const long size = L::UNIT_BYTES / L::UNIT_BLOCKS / parts;
    for (long line = 0; line < size; line += 64) {
        __builtin_prefetch(codes + part * size + line + AHEAD / 2);
        if (!FETCHES) __builtin_prefetch(codes + part * size + line + 2 * AHEAD, 0, 2);
    }
}

// Begins super-blocks with what only the sums of inputs decide: their minimums' part, or what codes' offset is too much.
template <class L, long N>
inline void take_sums(const uint8_t* head, const InputSuper* x, long pitch, long n, Ints (&whole)[N], Floats (&sums)[N]) {
    Ints factors[L::NUM_FACTORS / 2];
    for (int f = 0; f < L::NUM_FACTORS / 2; f++)
        factors[f] = joined(ints_of_bytes(head + L::factor_at(2 * f, L::HAS_MINIMUM)),
                            ints_of_bytes(head + L::factor_at(2 * f + 1, L::HAS_MINIMUM)));
    const Floats least = Floats{} - L::minimums(head);
#pragma GCC unroll 8
    for (long r = 0; r < n; r++) {
        const InputSuper& row = *beside(x, r * pitch);
        const int16_t* const each = L::HALVES == 2 ? row.half_sums : row.sums;
        Ints taken = {};
        for (int f = 0; f < L::NUM_FACTORS / 2; f++) taken += products_of_halves(factors[f], spread_bits(each + 2 * f));
        whole[r] = L::PRODUCT_OFFSET * (Ints{} - taken);
        if (L::HAS_MINIMUM) sums[r] = multiply_add(__builtin_convertvector(taken, Floats), least * spread(row.scale), sums[r]);
    }
}

// A panel times R rows of inputs, or `num_rows` where R is 0; `pitch` words from each other: sums [R].
template <class L, int R>
__attribute__((noinline)) void multiply_panel(const uint8_t* panel, const int32_t* x, long pitch, long num_rows,
                                              long num_blocks, Floats* to) {
    using G = Group<L>;
    const long n = R ? R : num_rows;
    Ints whole[R ? R : BLOCK_ROWS];   // sums of codes' products that are not complete
    Floats sums[R ? R : BLOCK_ROWS];
#pragma GCC unroll 8
    for (long r = 0; r < n; r++) sums[r] = Floats{};
    const InputRow first(x, num_blocks);
    for (long unit = 0; unit < num_blocks / L::UNIT_BLOCKS; unit++, panel += L::UNIT_BYTES) {
        const Floats scales = L::scales(panel), least = L::minimums(panel);
        if constexpr (L::IS_SUPER) take_sums<L>(panel, first.supers + unit, pitch, n, whole, sums);
        const uint8_t* codes = panel + L::HEAD_BYTES;
        for (long b = 0; b < L::UNIT_BLOCKS; b++, codes += L::CODE_BYTES)
#pragma GCC unroll 2
            for (int g = 0; g < G::COUNT; g++) {
                if (FETCHES || n > 1) fetch<L>(codes, g, G::COUNT);
                G group;
                group.read(codes, g * G::PACKS);
                if constexpr (L::IS_SUPER) {
                    group.by = ints_of_bytes(panel + L::factor_at(b * L::HALVES + (L::HALVES == 2 ? g : 0), false));
                    if (!HAS_LONG_SUMS) group.by = joined(group.by, group.by);
                }
                const int8_t* const inputs = (L::IS_SUPER ? first.supers[unit].codes + b * BLOCK_INPUTS
                                                          : first.blocks[unit].codes) + g * 4 * G::PACKS;
                constexpr int TOGETHER_ROWS = R ? R : 1;
#pragma GCC unroll 1
                for (long r = 0; r < n; r += TOGETHER_ROWS) {
                    Ints some[TOGETHER_ROWS];
#pragma GCC unroll 8
                    for (int i = 0; i < TOGETHER_ROWS; i++) {
                        const InputBlock& block = *beside(first.blocks + unit, (r + i) * pitch);
                        some[i] = L::IS_SUPER || g ? whole[r + i] : L::PRODUCT_OFFSET ? spread_bits(block.taken + L::TAKEN) : Ints{};
                    }
                    group.multiply(beside(inputs, r * pitch), pitch, some);
#pragma GCC unroll 8
                    for (int i = 0; i < TOGETHER_ROWS; i++) {
                        if (L::IS_SUPER || g + 1 < G::COUNT) {
                            whole[r + i] = some[i];
                            continue;
                        }
                        const InputBlock& block = *beside(first.blocks + unit, (r + i) * pitch);
                        Floats& sum = sums[r + i];
                        sum = multiply_add(__builtin_convertvector(some[i], Floats), scales * spread(block.scale), sum);
                        if (L::HAS_MINIMUM) sum = multiply_add(least, spread(block.sum), sum);
                    }
                }
            }
        if constexpr (L::IS_SUPER)
#pragma GCC unroll 8
            for (long r = 0; r < n; r++) {
                const Floats by = scales * spread(beside(first.supers + unit, r * pitch)->scale);
                sums[r] = multiply_add(__builtin_convertvector(whole[r], Floats), by, sums[r]);
            }
    }
#pragma GCC unroll 8
    for (long r = 0; r < n; r++) to[r] = sums[r];
}

constexpr long PARTS = 4;  // sums of an output's products with plain numbers, which need not wait for each other

// A panel of plain numbers times R rows.
template <class L, int R>
__attribute__((noinline)) void multiply_numbers(const uint8_t* panel, const int32_t* x, long pitch, long num_blocks,
                                                Floats* to) {
    const auto* weights = (const typename L::Number*)panel;
    const float* const inputs = InputRow(x, num_blocks).numbers;
    Floats sums[R][PARTS] = {};
    for (long i = 0; i < num_blocks * BLOCK_INPUTS; i += PARTS)
#pragma GCC unroll 4
        for (long p = 0; p < PARTS; p++, weights += WIDTH) {
            if (FETCHES || R > 1) __builtin_prefetch((const uint8_t*)weights + AHEAD / 2);
            const Floats some = kept(floats_of(weights));
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
                sums[r][p] = multiply_add(some, spread(beside(inputs, r * pitch)[i + p]), sums[r][p]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) to[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

// Likewise some rows, BLOCK_ROWS at most. With long sums, which wait for each other, all rows' are computed side by side.
template <class L>
inline void multiply_rows(const uint8_t* panel, const int32_t* x, long pitch, long n, long num_blocks, Floats* to) {
    if constexpr (!L::IS_PLAIN && !HAS_LONG_SUMS) return multiply_panel<L, 0>(panel, x, pitch, n, num_blocks, to);
    const auto some = [&](auto count) {
        constexpr long R = decltype(count)::value;
        if constexpr (L::IS_PLAIN && R * PARTS <= SUMS)
            for (; n >= R; n -= R, x += R * pitch, to += R) multiply_numbers<L, R>(panel, x, pitch, num_blocks, to);
        else if constexpr (!L::IS_PLAIN)
            for (; n >= R; n -= R, x += R * pitch, to += R) multiply_panel<L, R>(panel, x, pitch, R, num_blocks, to);
    };
    some(std::integral_constant<long, 8>());
    some(std::integral_constant<long, 7>());
    some(std::integral_constant<long, 6>());
    some(std::integral_constant<long, 5>());
    some(std::integral_constant<long, 4>());
    some(std::integral_constant<long, 3>());
    some(std::integral_constant<long, 2>());
    some(std::integral_constant<long, 1>());
}

// The largest magnitude of inputs [count]. Bits are ordered as magnitudes are; what is no number is the largest, and is heard of.
inline float largest_of(const float* row, long count) {
#if defined(__AVX2__)
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i bits = _mm256_setzero_si256();
    for (long i = 0; i < count; i += 8)
        bits = _mm256_max_epi32(bits, _mm256_and_si256(_mm256_loadu_si256((const __m256i*)(row + i)), magnitude));
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    most = _mm_max_epi32(most, _mm_srli_si128(most, 8));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(most, _mm_srli_si128(most, 4))));
#else
    Ints bits = {};
    for (long i = 0; i < count; i += WIDTH) {
        const Ints some = *(const Ints*)(row + i) & 0x7fffffff;
        bits = some > bits ? some : bits;
    }
    int32_t most = bits[0];
    for (long i = 1; i < WIDTH; i++) most = std::max(most, bits[i]);
    float largest;
    std::memcpy(&largest, &most, 4);
    return largest;
#endif
}

// Rounds a block of inputs to whole numbers, and finds the sums of the halves of these.
inline void round_block(const float* row, float by, int8_t* codes, int32_t (&sums)[2]) {
#if defined(__AVX2__)
    const auto some = [&](long i) {
        const __m256 moved = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(row + i), _mm256_set1_ps(by)), _mm256_set1_ps(128.5f));
        return _mm256_sub_epi32(_mm256_cvttps_epi32(moved), _mm256_set1_epi32(128));
    };
    const __m256i first = _mm256_packs_epi32(some(0), some(8)), second = _mm256_packs_epi32(some(16), some(24));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
    _mm256_storeu_si256((__m256i*)codes, bytes);
    // Of eight bytes without a sign, which are 128 more.
    const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m256i halves = _mm256_add_epi64(eights, _mm256_srli_si256(eights, 8));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(halves)) - 128 * BLOCK_INPUTS / 2;
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(halves, 1)) - 128 * BLOCK_INPUTS / 2;
#else
    for (long i = 0; i < BLOCK_INPUTS; i++) codes[i] = int8_t(int32_t(row[i] * by + 128.5f) - 128);
    for (long h = 0; h < 2; h++) {
        sums[h] = 0;
        for (long i = 0; i < BLOCK_INPUTS / 2; i++) sums[h] += codes[h * BLOCK_INPUTS / 2 + i];
    }
#endif
}

// Inputs [size] as blocks, as super-blocks and as they are; what fills the last block is 0.
inline void prepare_inputs(const float* row, long size, int32_t* words) {
    auto* block = (InputBlock*)words;
    const long num_blocks = blocks_for(size);
    float* numbers = (float*)InputRow(words, num_blocks).numbers;
    std::fill(std::copy_n(row, size, numbers), numbers + num_blocks * BLOCK_INPUTS, 0.0f);
    const auto factor = [](float largest) { return largest > 0x1p-119f ? 127.0f / largest : 0.0f; };  // or it is infinite
    int32_t sums[2];
    for (long b = 0; b < num_blocks; b++, block++) {
        const float* const from = numbers + b * BLOCK_INPUTS;
        const float largest = largest_of(from, BLOCK_INPUTS);
        round_block(from, factor(largest), block->codes, sums);
        block->scale = largest / 127.0f;
        const int32_t sum = sums[0] + sums[1];
        block->sum = block->scale * float(sum);
        for (int o = 0; o < 3; o++) block->taken[o] = -OFFSETS[o] * sum;
    }
    if (size % SUPER_INPUTS) return;
    auto* super = (InputSuper*)block;
    for (long begin = 0; begin < size; begin += SUPER_INPUTS, super++) {
        const float largest = largest_of(numbers + begin, SUPER_INPUTS);
        super->scale = largest / 127.0f;
        for (long b = 0; b < SUPER_BLOCKS; b++) {
            round_block(numbers + begin + b * BLOCK_INPUTS, factor(largest), super->codes + b * BLOCK_INPUTS, sums);
            for (long h = 0; h < 2; h++) super->half_sums[2 * b + h] = int16_t(sums[h]);
            super->sums[b] = int16_t(sums[0] + sums[1]);
        }
    }
}

// ---- From a file's rows to panels, and back to numbers --------------------------------------------------------------

// A block of 32 weights as a file holds it: 16 bits or, in K types, also bytes of scales and minimums.
struct FileBlock {
    uint16_t bits[2] = {};      // of the scale, of the minimum
    int8_t factors[2][2] = {};  // likewise, of each half
    uint8_t codes[BLOCK_INPUTS] = {};

    template <class L>
    bool is_finite() const {
        return L::IS_BFLOAT16 || ((bits[0] & 0x7c00) != 0x7c00 && (bits[1] & 0x7c00) != 0x7c00);
    }
};

inline uint16_t half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return bits;
}

inline void nibbles(const uint8_t* from, FileBlock& block) {
    uint64_t each[2];
    std::memcpy(each, from, 16);
    for (int high = 0; high < 2; high++)
        for (int i = 0; i < 2; i++) {
            const uint64_t codes = each[i] >> 4 * high & 0x0f0f0f0f0f0f0f0fu;
            std::memcpy(block.codes + 16 * high + 8 * i, &codes, 8);
        }
}

// Eight at once: byte i of `each` keeps bit i, which the sum carries to the byte's highest.
inline void fifth_bits(const uint8_t* from, FileBlock& block) {
    for (long begin = 0; begin < 32; begin += 8) {
        const uint64_t each = from[begin / 8] * 0x0101010101010101u & 0x8040201008040201u;
        uint64_t codes;
        std::memcpy(&codes, block.codes + begin, 8);
        codes |= (each + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
        std::memcpy(block.codes + begin, &codes, 8);
    }
}

// The scale and minimum, 6 bits each, of one of the eight blocks of a Q4_K or Q5_K.
inline void six_bits(const uint8_t* packed, long b, FileBlock& block) {
    if (b < 4) {
        block.factors[0][0] = packed[b] & 63;
        block.factors[1][0] = packed[b + 4] & 63;
    } else {
        block.factors[0][0] = int8_t((packed[b + 4] & 15) | packed[b - 4] >> 6 << 4);
        block.factors[1][0] = int8_t(packed[b + 4] >> 4 | packed[b] >> 6 << 4);
    }
}

template <class L>
constexpr long file_bytes() {  // of a block, or of a K type's eight
    switch (L::ID) {
        case Q2_K::ID: return 84;
        case Q3_K::ID: return 110;
        case Q4_K::ID: return 144;
        case Q5_K::ID: return 176;
        case Q6_K::ID: return 210;
        case IQ4_XS::ID: return 136;
        case MXFP4::ID: return 17;
    }
    return 2 * (1 + L::HAS_MINIMUM) + BLOCK_INPUTS * L::BITS / 8;
}

template <class L>
constexpr long row_bytes(long in) {
    if constexpr (L::IS_PLAIN) return in * sizeof(typename L::Number);
    else return blocks_for(in) / L::UNIT_BLOCKS * file_bytes<L>();
}

template <class L>
inline bool is_finite(typename L::Bits bits) {
    return (bits & L::EXPONENT) != L::EXPONENT;
}

// A row's block of a file, which ggml describes in ggml-common.h.
template <class L>
inline FileBlock file_block(const uint8_t* row, long number) {
    FileBlock block;
    const long b = number % SUPER_BLOCKS;
    const uint8_t* from = row + number / L::UNIT_BLOCKS * file_bytes<L>();
    if constexpr (L::ID == Q6_K::ID) {
        const long half = b / 4, quarter = b % 4;
        const uint8_t *const low = from + 64 * half + 32 * (quarter % 2), *const high = from + 128 + 32 * half;
        for (long i = 0; i < 32; i++)
            block.codes[i] = uint8_t((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * quarter & 3) << 4);
        for (long h = 0; h < 2; h++) block.factors[0][h] = int8_t(from[192 + 2 * b + h]);
        block.bits[0] = half_at(from + 208);
    } else if constexpr (L::ID == Q2_K::ID || L::ID == Q3_K::ID) {
        constexpr bool HAS_THIRD = L::ID == Q3_K::ID;
        const uint8_t* const low = from + (HAS_THIRD ? 32 : 16) + 32 * (b / 4);
        for (long i = 0; i < 32; i++) {
            block.codes[i] = low[i] >> 2 * (b % 4) & 3;
            if (HAS_THIRD) block.codes[i] |= (from[i] >> b & 1) << 2;
        }
        for (long h = 0; h < 2; h++) {
            const long f = 2 * b + h;
            if (HAS_THIRD) {
                const uint8_t* const packed = from + 96;
                const int low4 = f < 8 ? packed[f] & 15 : packed[f - 8] >> 4;
                block.factors[0][h] = int8_t((low4 | (packed[8 + f % 4] >> 2 * (f / 4) & 3) << 4) - 32);
            } else {
                block.factors[0][h] = from[f] & 15;
                block.factors[1][h] = from[f] >> 4;
            }
        }
        block.bits[0] = half_at(from + (HAS_THIRD ? 108 : 80));
        if (!HAS_THIRD) block.bits[1] = half_at(from + 82);
    } else if constexpr (L::ID == IQ4_XS::ID) {
        block.bits[0] = half_at(from);
        block.factors[0][0] = int8_t(((from[4 + b / 2] >> 4 * (b % 2) & 15) | (half_at(from + 2) >> 2 * b & 3) << 4) - 32);
        nibbles(from + 8 + 16 * b, block);
    } else if constexpr (L::IS_SUPER) {
        block.bits[0] = half_at(from);
        block.bits[1] = half_at(from + 2);
        six_bits(from + 4, b, block);
        const uint8_t* const codes = from + (L::BITS == 5 ? 48 : 16) + 32 * (b / 2);
        for (long i = 0; i < 32; i++) {
            block.codes[i] = b % 2 ? codes[i] >> 4 : codes[i] & 15;
            if (L::BITS == 5) block.codes[i] |= (from[16 + i] >> b & 1) << 4;
        }
    } else if constexpr (L::ID == MXFP4::ID) {  // 2^(exponent - 128), whose last two have no exponent in 16 bits
        block.bits[0] = uint16_t(from[0] < 2 ? 0x20 << from[0] : (from[0] - 1) << 7);
        nibbles(from + 1, block);
    } else {
        for (int h = 0; h <= L::HAS_MINIMUM; h++, from += 2) block.bits[h] = half_at(from);
        if constexpr (L::BITS == 8) {
            for (long i = 0; i < 32; i++) block.codes[i] = from[i] ^ 0x80;
        } else {
            if (L::BITS == 5) nibbles(from + 4, block), fifth_bits(from, block);
            else nibbles(from, block);
        }
    }
    return block;
}

// Puts NUM bits of each code of a block's packs, those from `place` on, where `Group::bits_of` finds them.
template <int NUM>
inline void put_bits(const Codes (&packs)[8], int place, uint8_t* to) {
    constexpr int SHARED = 8 / NUM;
    for (int p = 0; p < 8; p += SHARED, to += 4 * WIDTH) {
        Codes all = {};
        for (int s = 0; s < SHARED; s++) {
            const Codes bits = (Codes)((Shorts)packs[p + s] >> place) & uint8_t((1 << NUM) - 1);
            all |= (Codes)((Shorts)bits << s * NUM);
        }
        std::memcpy(to, &all, sizeof all);
    }
}

// Fills a panel with outputs, as many as it has lanes or fewer, that are rows of a file; `order` [count] names the row of
// each. Returns how many blocks have a scale that is no finite number, or how many plain numbers are not.
template <class L>
inline int64_t fill_panel(const uint8_t* rows, const int64_t* order, long count, long in, uint8_t* panel) {
    int64_t num_broken = 0;
    const long num_blocks = blocks_for(in);
    if (count < WIDTH || in % BLOCK_INPUTS) std::memset(panel, 0, panel_bytes<L>(num_blocks));
    if constexpr (L::IS_PLAIN) {
        using Bits = typename L::Bits;
        for (long i = 0; i < in; i++)
            for (long lane = 0; lane < count; lane++) {
                const Bits bits = ((const Bits*)(rows + order[lane] * row_bytes<L>(in)))[i];
                ((Bits*)panel)[i * WIDTH + lane] = bits;
                num_broken += !is_finite<L>(bits);
            }
        return num_broken;
    } else for (long number = 0; number < num_blocks; number++) {
        const long b = number % L::UNIT_BLOCKS;
        uint8_t* const head = panel + number / L::UNIT_BLOCKS * L::UNIT_BYTES;
        uint8_t* const codes = head + L::HEAD_BYTES + b * L::CODE_BYTES;
        Codes packs[8] = {};
        for (long lane = 0; lane < count; lane++) {
            const FileBlock block = file_block<L>(rows + order[lane] * row_bytes<L>(in), number);
            num_broken += !block.is_finite<L>();
            for (int is_minimum = 0; is_minimum <= L::HAS_MINIMUM; is_minimum++) {
                if (!b) std::memcpy(head + L::bits_at(is_minimum) + 2 * lane, &block.bits[is_minimum], 2);
                for (int h = 0; L::IS_SUPER && h < L::HALVES; h++)
                    head[L::factor_at(b * L::HALVES + h, is_minimum) + lane] = uint8_t(block.factors[is_minimum][h]);
            }
            for (int p = 0; p < 8; p++) std::memcpy((uint8_t*)&packs[p] + 4 * lane, block.codes + 4 * p, 4);
        }
        put_bits<L::LOW>(packs, 0, codes + L::HIGH_BYTES);
        if constexpr (L::BITS > L::LOW) put_bits<L::BITS - L::LOW>(packs, L::LOW, codes);
    }
    return num_broken;
}

// How many blocks of rows of a file have a scale that is no finite number, or how many plain numbers are not.
template <class L>
inline int64_t broken_blocks(const uint8_t* rows, long count, long in) {
    int64_t num_broken = 0;
    for (long row = 0; row < count; row++, rows += row_bytes<L>(in)) {
        if constexpr (L::IS_PLAIN)
            for (long i = 0; i < in; i++) num_broken += !is_finite<L>(((const typename L::Bits*)rows)[i]);
        else
            for (long number = 0; number < blocks_for(in); number += L::UNIT_BLOCKS)
                num_broken += !file_block<L>(rows, number).template is_finite<L>();
    }
    return num_broken;
}

// The numbers of a lane of a panel.
template <class L>
inline void plain_row(const uint8_t* panel, long lane, long in, float by, float* to) {
    if constexpr (L::IS_PLAIN) {
        const auto* const numbers = (const typename L::Number*)panel + lane;
        for (long i = 0; i < in; i++) to[i] = float_of(numbers[i * WIDTH]) * by;
    } else for (long number = 0; number < blocks_for(in); number++, to += BLOCK_INPUTS) {
        const long b = number % L::UNIT_BLOCKS;
        const uint8_t* const head = panel + number / L::UNIT_BLOCKS * L::UNIT_BYTES;
        const uint8_t* const codes = head + L::HEAD_BYTES + b * L::CODE_BYTES;
        const auto factor_of = [&](long i, bool is_minimum) {
            const uint16_t bits = half_at(head + L::bits_at(is_minimum) + 2 * lane);
            const float whole = L::IS_BFLOAT16 ? float_of(bits) : float_of_half(bits);
            if (!L::IS_SUPER) return whole;
            return whole * float(int8_t(head[L::factor_at(b * L::HALVES + i * L::HALVES / BLOCK_INPUTS, is_minimum) + lane]));
        };
        const auto bits_of = [&](const uint8_t* from, long i, int num) {
            const long pack = i / 4, shared = 8 / num;
            return from[pack / shared * 4 * WIDTH + 4 * lane + i % 4] >> pack % shared * num & ((1 << num) - 1);
        };
        for (long i = 0; i < std::min(BLOCK_INPUTS, in - number * BLOCK_INPUTS); i++) {
            int32_t code = bits_of(codes + L::HIGH_BYTES, i, L::LOW);
            if (L::BITS > L::LOW) code |= bits_of(codes, i, L::BITS - L::LOW) << L::LOW;
            if (L::VALUES) code = L::VALUES[code];
            const float value = factor_of(i, false) * float(code - L::OFFSET);
            const float least = L::HAS_MINIMUM ? factor_of(i, true) : 0.0f;
            to[i] = (L::IS_SUPER ? value - least : value + least) * by;
        }
    }
}

// The numbers of a row of a file.
template <class L>
inline void file_row(const uint8_t* rows, int64_t row, long in, float by, float* to) {
    std::vector<uint8_t> panel(panel_bytes<L>(blocks_for(in)));
    fill_panel<L>(rows, &row, 1, in, panel.data());
    plain_row<L>(panel.data(), 0, in, by, to);
}
