// Products with weights as GGUF files hold them: blocks of 32 inputs, whose codes share a scale and perhaps a minimum.
//
// A panel holds as many outputs as a vector has lanes, block after block, so that a product reads it from front to back and
// nothing is summed across lanes: every instruction set adds the same numbers in the same order. Inputs are whole numbers
// with a scale for each block. In this file W is WIDTH, the lanes of a vector.

// A block of a row's inputs.
struct InputBlock {
    int8_t codes[32];
    float scale;
    float sum;           // of the inputs as the codes tell them
    int16_t sums[2];     // of the first and of the last 16 codes
};

typedef uint8_t Codes __attribute__((vector_size(4 * WIDTH), aligned(1), may_alias));  // 4 inputs of each lane

constexpr long BLOCK_INPUTS = 32, SUPER_BLOCKS = 8;

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

template <bool IS_SIGNED>
inline Floats floats_of_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
    return (Floats)_mm512_cvtepi32_ps(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)from);
    return (Floats)_mm256_cvtepi32_ps(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    Floats values;
    for (long i = 0; i < WIDTH; i++) values[i] = IS_SIGNED ? float(int8_t(from[i])) : float(from[i]);
    return values;
#endif
}

// How a type of block lies in a panel. Of a block: a scale for each lane and half, a minimum where it has one, and codes
// of BITS each with OFFSET for 0: 4 low bits of packs 2j and 2j + 1 share a byte, what is above them stands behind. Blocks of
// a K type have bytes in place of 16-bit scales and minimums, which 16 bits before every eighth block multiply.
template <int TYPE, int BITS_, int OFFSET_, bool HAS_MINIMUM_, bool IS_SUPER_, int HALVES_ = 1, bool IS_TABLE_ = false>
struct Layout {
    static constexpr int BITS = BITS_, OFFSET = OFFSET_, HALVES = HALVES_;
    static constexpr bool HAS_MINIMUM = HAS_MINIMUM_, IS_SUPER = IS_SUPER_, IS_TABLE = IS_TABLE_;
    static constexpr int ID = TYPE;
    static constexpr long CODE_BYTES = WIDTH * BLOCK_INPUTS * BITS / 8;
    static constexpr long SCALE_BYTES = WIDTH * (IS_SUPER ? 1 : 2);
    static constexpr long BYTES = SCALE_BYTES * (HALVES + HAS_MINIMUM) + CODE_BYTES;
    static constexpr long SUPER_BYTES = IS_SUPER ? 2 * WIDTH * (1 + HAS_MINIMUM) : 0;
};

using Q4_0 = Layout<2, 4, 8, false, false>;
using Q4_1 = Layout<3, 4, 0, true, false>;
using Q5_0 = Layout<6, 5, 16, false, false>;
using Q5_1 = Layout<7, 5, 0, true, false>;
using Q8_0 = Layout<8, 8, 128, false, false>;
using Q4_K = Layout<12, 4, 0, true, true>;
using Q5_K = Layout<13, 5, 0, true, true>;
using Q6_K = Layout<14, 6, 32, false, true, 2>;
using IQ4_NL = Layout<20, 4, 128, false, false, 1, true>;

// Calls work with the layout of a type; false where there is none.
template <class Work>
inline bool with_layout(int64_t type, Work work) {
    switch (type) {
        case Q4_0::ID: work(Q4_0()); return true;
        case Q4_1::ID: work(Q4_1()); return true;
        case Q5_0::ID: work(Q5_0()); return true;
        case Q5_1::ID: work(Q5_1()); return true;
        case Q8_0::ID: work(Q8_0()); return true;
        case Q4_K::ID: work(Q4_K()); return true;
        case Q5_K::ID: work(Q5_K()); return true;
        case Q6_K::ID: work(Q6_K()); return true;
        case IQ4_NL::ID: work(IQ4_NL()); return true;
    }
    return false;
}

// What IQ4_NL's codes mean, 128 more.
constexpr uint8_t IQ4_VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

template <class L>
inline long panel_bytes(long num_blocks) {
    return num_blocks * L::BYTES + num_blocks / SUPER_BLOCKS * L::SUPER_BYTES;
}

// ---- Sums of products of codes and inputs --------------------------------------------------------------------------

#if defined(__AVX512VNNI__)
template <class L>
struct Dots {
    Ints total;

    void begin(int32_t value) { total = spread_bits(&value); }
    void add(Codes codes, const int8_t* inputs) {
        total = (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, (__m512i)spread_bits(inputs));
    }
    void flush(int) {}
    Ints value() const { return total; }
};
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#if defined(__AVX512BW__)
inline Ints pairs_of(Codes codes, Ints inputs) { return (Ints)_mm512_maddubs_epi16((__m512i)codes, (__m512i)inputs); }
inline Ints added(Ints a, Ints b) { return (Ints)_mm512_add_epi16((__m512i)a, (__m512i)b); }
inline Ints sums_of_pairs(Ints pairs, int by) { return (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(short(by))); }
#else
inline Ints pairs_of(Codes codes, Ints inputs) { return (Ints)_mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs); }
inline Ints added(Ints a, Ints b) { return (Ints)_mm256_add_epi16((__m256i)a, (__m256i)b); }
inline Ints sums_of_pairs(Ints pairs, int by) { return (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(short(by))); }
#endif
// 16 bits hold eight sums of two products with 4 bits (8 · 2 · 15 · 127), four with 5 and two with 6. Codes of 8 bits are
// multiplied as two of 4.
template <class L>
struct Dots {
    static constexpr bool IS_SPLIT = L::BITS == 8 || L::IS_TABLE;
    static constexpr int EVERY = L::BITS == 5 ? 2 : L::BITS == 6 ? 1 : 4;  // pairs of packs that 16 bits hold
    Ints total, low, high;

    void begin(int32_t value) {
        total = spread_bits(&value);
        low = high = Ints{};
    }
    void add(Codes codes, const int8_t* inputs) {
        const Ints some = spread_bits(inputs);
        if constexpr (IS_SPLIT) {
            low = added(low, pairs_of(codes & 15, some));
            high = added(high, pairs_of((Codes)((Shorts)codes >> 4) & 15, some));
        } else {
            low = added(low, pairs_of(codes, some));
        }
    }
    void flush(int pair) {
        if ((pair + 1) % EVERY) return;
        total += sums_of_pairs(low, 1);
        if constexpr (IS_SPLIT) total += sums_of_pairs(high, 16);
        low = high = Ints{};
    }
    Ints value() const { return total; }
};
#else
template <class L>
struct Dots {
    Ints total;

    void begin(int32_t value) { total = spread_bits(&value); }
    void add(Codes codes, const int8_t* inputs) {
        for (long i = 0; i < WIDTH; i++)
            for (long j = 0; j < 4; j++) total[i] += int32_t(codes[4 * i + j]) * inputs[j];
    }
    void flush(int) {}
    Ints value() const { return total; }
};
#endif

// ---- Codes of a panel ----------------------------------------------------------------------------------------------

inline Codes codes_at(const uint8_t* from) {
    Codes codes;
    std::memcpy(&codes, from, sizeof codes);
    return codes;
}

// Each of 4 W bits as a byte: `by` where it is 1.
inline Codes spread_each_bit(const uint8_t* from, uint8_t by) {
#if defined(__AVX512BW__)
    uint64_t bits;
    std::memcpy(&bits, from, 8);
    return (Codes)_mm512_maskz_set1_epi8(bits, char(by));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    const __m256i bytes = _mm256_and_si256(_mm256_shuffle_epi8((__m256i)spread_bits(from), places), each);
    return (Codes)_mm256_and_si256(_mm256_cmpeq_epi8(bytes, each), _mm256_set1_epi8(char(by)));
#else
    Codes codes;
    for (long i = 0; i < 4 * WIDTH; i++) codes[i] = from[i / 8] >> i % 8 & 1 ? by : 0;
    return codes;
#endif
}

inline Codes looked_up(Codes codes) {  // in IQ4_VALUES
#if defined(__AVX512BW__)
    return (Codes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)IQ4_VALUES)), (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (Codes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)IQ4_VALUES)), (__m256i)codes);
#else
    for (long i = 0; i < 4 * WIDTH; i++) codes[i] = IQ4_VALUES[codes[i]];
    return codes;
#endif
}

// Codes of packs 2 · pair and the next one.
template <class L>
inline void unpack(const uint8_t* from, int pair, Codes& first, Codes& second) {
    constexpr long VECTOR = 4 * WIDTH;
    if constexpr (L::BITS == 8) {
        first = codes_at(from + 2 * pair * VECTOR);
        second = codes_at(from + (2 * pair + 1) * VECTOR);
        return;
    }
    const Codes both = codes_at(from + pair * VECTOR);
    first = both & 15;
    second = (Codes)((Shorts)both >> 4) & 15;
    if constexpr (L::BITS == 5) {
        const uint8_t* const bits = from + 4 * VECTOR + 2 * pair * VECTOR / 8;
        first |= spread_each_bit(bits, 16);
        second |= spread_each_bit(bits + VECTOR / 8, 16);
    }
    if constexpr (L::BITS == 6) {  // two bits of four packs share a byte
        const Codes high = codes_at(from + (4 + pair / 2) * VECTOR);
        if (pair % 2 == 0) {
            first |= (Codes)((Shorts)high << 4) & 0x30;
            second |= (Codes)((Shorts)high << 2) & 0x30;
        } else {
            first |= high & 0x30;
            second |= (Codes)((Shorts)high >> 2) & 0x30;
        }
    }
    if constexpr (L::IS_TABLE) {
        first = looked_up(first);
        second = looked_up(second);
    }
}

// A panel times R rows of inputs, blocks of each: sums [R].
template <class L, int R>
__attribute__((noinline)) void multiply_panel(const uint8_t* panel, const InputBlock* x, long num_blocks, Floats* found) {
    Floats sums[R] = {}, d, least_d;
    for (long b = 0; b < num_blocks; b++, x++) {
        if (L::IS_SUPER && b % SUPER_BLOCKS == 0) {
            d = floats_of_halves(panel);
            if (L::HAS_MINIMUM) least_d = floats_of_halves(panel + 2 * WIDTH);
            panel += L::SUPER_BYTES;
        }
        Floats scales[L::HALVES], least;
        for (int h = 0; h < L::HALVES; h++) {
            const uint8_t* const from = panel + h * L::SCALE_BYTES;
            scales[h] = L::IS_SUPER ? d * floats_of_bytes<L::HALVES == 2>(from) : floats_of_halves(from);
        }
        if (L::HAS_MINIMUM) {
            const uint8_t* const from = panel + L::HALVES * L::SCALE_BYTES;
            least = L::IS_SUPER ? Floats{} - least_d * floats_of_bytes<false>(from) : floats_of_halves(from);
        }
        const uint8_t* const codes = panel + L::SCALE_BYTES * (L::HALVES + L::HAS_MINIMUM);
        Dots<L> dots[R][L::HALVES];
        for (int r = 0; r < R; r++)
            for (int h = 0; h < L::HALVES; h++) {
                const InputBlock& row = x[r * num_blocks];
                dots[r][h].begin(-L::OFFSET * (L::HALVES == 2 ? row.sums[h] : row.sums[0] + row.sums[1]));
            }
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            Codes first, second;
            unpack<L>(codes, pair, first, second);
            if (FETCHES || R > 1) __builtin_prefetch(codes + pair * (L::BYTES / 4) + AHEAD / 2);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                Dots<L>& own = dots[r][L::HALVES == 2 ? pair / 2 : 0];
                own.add(first, x[r * num_blocks].codes + 8 * pair);
                own.add(second, x[r * num_blocks].codes + 8 * pair + 4);
                own.flush(pair);
            }
        }
        for (int r = 0; r < R; r++) {
            const InputBlock& row = x[r * num_blocks];
            for (int h = 0; h < L::HALVES; h++) {
                const Floats whole = __builtin_convertvector(dots[r][h].value(), Floats);
                sums[r] = multiply_add(whole, scales[h] * spread(row.scale), sums[r]);
            }
            if (L::HAS_MINIMUM) sums[r] = multiply_add(least, spread(row.sum), sums[r]);
        }
        panel += L::BYTES;
    }
    std::memcpy(found, sums, sizeof sums);
}

// Inputs [size] as blocks; what fills the last one is 0.
inline void quantize_inputs(const float* row, long size, InputBlock* to) {
    for (long begin = 0; begin < size; begin += BLOCK_INPUTS, to++) {
        const long count = std::min(BLOCK_INPUTS, size - begin);
        int32_t bits = 0;  // of magnitudes, which are ordered as they are; what is no number is the largest, and is heard of
        for (long i = 0; i < count; i++) {
            int32_t some;
            std::memcpy(&some, row + begin + i, 4);
            bits = std::max(bits, some & 0x7fffffff);
        }
        float largest;
        std::memcpy(&largest, &bits, 4);
        const float by = largest > 0.0f ? 127.0f / largest : 0.0f;
        int32_t sums[2] = {};
        for (long i = 0; i < BLOCK_INPUTS; i++) {
            const int32_t code = i < count ? int32_t(row[begin + i] * by + 128.5f) - 128 : 0;
            to->codes[i] = int8_t(code);
            sums[i / 16] += code;
        }
        to->scale = largest / 127.0f;
        to->sum = to->scale * float(sums[0] + sums[1]);
        to->sums[0] = int16_t(sums[0]);
        to->sums[1] = int16_t(sums[1]);
    }
}

// ---- From a file's rows to panels, and back to numbers --------------------------------------------------------------

// A block of 32 weights as a file holds it: 16 bits or, in K types, bytes of scales and minimums.
struct FileBlock {
    uint16_t d = 0, least_d = 0;
    uint8_t scales[2] = {}, least = 0;
    uint8_t codes[BLOCK_INPUTS] = {};
};

inline uint16_t half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return bits;
}

inline void nibbles(const uint8_t* from, FileBlock& block) {
    for (long i = 0; i < 16; i++) {
        block.codes[i] = from[i] & 15;
        block.codes[i + 16] = from[i] >> 4;
    }
}

inline void fifth_bits(const uint8_t* from, FileBlock& block) {
    for (long i = 0; i < 32; i++) block.codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// The scale and minimum, 6 bits each, of one of the eight blocks of a Q4_K or Q5_K.
inline void six_bits(const uint8_t* packed, long b, FileBlock& block) {
    if (b < 4) {
        block.scales[0] = packed[b] & 63;
        block.least = packed[b + 4] & 63;
    } else {
        block.scales[0] = uint8_t((packed[b + 4] & 15) | packed[b - 4] >> 6 << 4);
        block.least = uint8_t(packed[b + 4] >> 4 | packed[b] >> 6 << 4);
    }
}

template <class L>
constexpr long file_bytes() {  // of a block, or of a K type's eight
    return L::ID == Q4_K::ID ? 144 : L::ID == Q5_K::ID ? 176 : L::ID == Q6_K::ID ? 210
         : 2 * (1 + L::HAS_MINIMUM) + BLOCK_INPUTS * L::BITS / 8;
}

template <class L>
constexpr long row_bytes(long num_blocks) {
    return (L::IS_SUPER ? num_blocks / SUPER_BLOCKS : num_blocks) * file_bytes<L>();
}

// A row's block of a file, which ggml describes in ggml-common.h.
template <class L>
inline FileBlock file_block(const uint8_t* row, long number) {
    FileBlock block;
    const long b = number % SUPER_BLOCKS;
    const uint8_t* from = row + (L::IS_SUPER ? number / SUPER_BLOCKS : number) * file_bytes<L>();
    if constexpr (L::ID == Q6_K::ID) {
        const long half = b / 4, quarter = b % 4;
        const uint8_t *const low = from + 64 * half + 32 * (quarter % 2), *const high = from + 128 + 32 * half;
        for (long i = 0; i < 32; i++)
            block.codes[i] = uint8_t((quarter < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * quarter & 3) << 4);
        for (long h = 0; h < 2; h++) block.scales[h] = from[192 + 2 * b + h];
        block.d = half_at(from + 208);
    } else if constexpr (L::IS_SUPER) {
        block.d = half_at(from);
        block.least_d = half_at(from + 2);
        six_bits(from + 4, b, block);
        const uint8_t* const codes = from + (L::BITS == 5 ? 48 : 16) + 32 * (b / 2);
        for (long i = 0; i < 32; i++) {
            block.codes[i] = b % 2 ? codes[i] >> 4 : codes[i] & 15;
            if (L::BITS == 5) block.codes[i] |= (from[16 + i] >> b & 1) << 4;
        }
    } else {
        block.d = half_at(from);
        from += 2;
        if (L::HAS_MINIMUM) block.least_d = half_at(from);
        from += 2 * L::HAS_MINIMUM;
        if constexpr (L::BITS == 8) {
            for (long i = 0; i < 32; i++) block.codes[i] = from[i] ^ 0x80;
        } else {
            if (L::BITS == 5) nibbles(from + 4, block), fifth_bits(from, block);
            else nibbles(from, block);
        }
    }
    return block;
}

// Puts a block into a lane of a panel's.
template <class L>
inline void put_block(const FileBlock& block, long number, long lane, uint8_t* panel) {
    constexpr long VECTOR = 4 * WIDTH;
    panel += number * L::BYTES + (L::IS_SUPER ? number / SUPER_BLOCKS + 1 : 0) * L::SUPER_BYTES;
    if (L::IS_SUPER) {
        if (number % SUPER_BLOCKS == 0) {
            std::memcpy(panel - L::SUPER_BYTES + 2 * lane, &block.d, 2);
            if (L::HAS_MINIMUM) std::memcpy(panel - L::SUPER_BYTES + 2 * (WIDTH + lane), &block.least_d, 2);
        }
        for (int h = 0; h < L::HALVES; h++) panel[h * WIDTH + lane] = block.scales[h];
        if (L::HAS_MINIMUM) panel[L::HALVES * WIDTH + lane] = block.least;
    } else {
        std::memcpy(panel + 2 * lane, &block.d, 2);
        if (L::HAS_MINIMUM) std::memcpy(panel + 2 * (WIDTH + lane), &block.least_d, 2);
    }
    panel += L::SCALE_BYTES * (L::HALVES + L::HAS_MINIMUM);
    for (long i = 0; i < BLOCK_INPUTS; i++) {
        const long pack = i / 4, place = 4 * lane + i % 4;
        const uint8_t code = block.codes[i];
        if (L::BITS == 8) {
            panel[pack * VECTOR + place] = code;
            continue;
        }
        panel[pack / 2 * VECTOR + place] |= uint8_t((code & 15) << 4 * (pack % 2));
        uint8_t* const more = panel + 4 * VECTOR;
        if (L::BITS == 5) more[(pack * VECTOR + place) / 8] |= uint8_t(code >> 4 << place % 8);
        if (L::BITS == 6) more[pack / 4 * VECTOR + place] |= uint8_t(code >> 4 << 2 * (pack % 4));
    }
}

// The numbers of a lane of a panel.
template <class L>
inline void plain_row(const uint8_t* panel, long lane, long num_blocks, float by, float* to) {
    constexpr long VECTOR = 4 * WIDTH;
    float d = 0, least_d = 0;
    for (long b = 0; b < num_blocks; b++, panel += L::BYTES, to += BLOCK_INPUTS) {
        if (L::IS_SUPER && b % SUPER_BLOCKS == 0) {
            d = float_of_half(half_at(panel + 2 * lane));
            if (L::HAS_MINIMUM) least_d = float_of_half(half_at(panel + 2 * (WIDTH + lane)));
            panel += L::SUPER_BYTES;
        }
        const uint8_t* const codes = panel + L::SCALE_BYTES * (L::HALVES + L::HAS_MINIMUM);
        float least = 0;
        if (L::HAS_MINIMUM)
            least = L::IS_SUPER ? -(least_d * float(panel[L::HALVES * WIDTH + lane]))
                                : float_of_half(half_at(panel + 2 * (L::HALVES * WIDTH + lane)));
        for (long i = 0; i < BLOCK_INPUTS; i++) {
            const long pack = i / 4, place = 4 * lane + i % 4, h = L::HALVES == 2 ? i / 16 : 0;
            int32_t code;
            if (L::BITS == 8) code = codes[pack * VECTOR + place];
            else code = codes[pack / 2 * VECTOR + place] >> 4 * (pack % 2) & 15;
            const uint8_t* const more = codes + 4 * VECTOR;
            if (L::BITS == 5) code |= (more[(pack * VECTOR + place) / 8] >> place % 8 & 1) << 4;
            if (L::BITS == 6) code |= (more[pack / 4 * VECTOR + place] >> 2 * (pack % 4) & 3) << 4;
            if (L::IS_TABLE) code = IQ4_VALUES[code];
            float scale;
            if (L::HALVES == 2) scale = d * float(int8_t(panel[h * WIDTH + lane]));
            else scale = L::IS_SUPER ? d * float(panel[lane]) : float_of_half(half_at(panel + 2 * lane));
            const float value = scale * float(code - L::OFFSET);
            to[i] = (L::HAS_MINIMUM ? value + least : value) * by;
        }
    }
}
