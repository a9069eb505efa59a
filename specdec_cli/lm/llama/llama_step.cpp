// A forward of a decoder in one call: RMS norms, rotary positions, grouped heads, a gated MLP or a mixture of them.
//
// What differs between families is data of a layer: which norms there are, its window, its rotations, its experts.
// A row's numbers are computed in one order, whatever rows are beside it, so that it has the same bits in any company.
// It is compiled for one kind of weights, WEIGHTS (Float32, BFloat16, Int8 or Blocks), and for one NUMBER, which keys, values
// and an embedding that is not in blocks are of: float, or uint16_t for bfloat16.
// Letters: n rows, H query heads, K key heads, G = H/K, D head size, R rotated numbers of it, I MLP width, E experts,
// V vocabulary.

#include "vectors.h"

namespace {

#include "tiles.h"

inline float exponential(float x) { return std::exp(x); }

// cap * tanh(x / cap): near 0 a polynomial, elsewhere by e^x (Cephes' tanhf).
inline Floats capped(Floats x, float cap) {
    const Floats y = x / cap, z = y * y, size = y < 0.0f ? Floats{} - y : y;
    Floats near = Floats{} - 5.70498872745e-3f;
    for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
        near = multiply_add(near, z, Floats{} + c);
    near = multiply_add(near * z, y, y);
    const Floats far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    return (size < 0.625f ? near : y < 0.0f ? Floats{} - far : far) * cap;
}

inline void cap_all(float* x, long count, float cap) {
    for (long i = 0; i < count; i += WIDTH) {
        const size_t size = std::min(WIDTH, count - i) * sizeof(float);
        Floats some = {};
        std::memcpy(&some, x + i, size);
        some = capped(some, cap);
        std::memcpy(x + i, &some, size);
    }
}

}  // namespace

extern "C" {

// Weights [out, in] of a kind in panels [in / PACK, outputs, PACK], PANEL outputs in each and at the end half and a quarter
// as many, but not fewer than LEAST: a product reads them from front to back, as fast as memory gives, an input meets all
// of a panel's outputs, and nothing is summed across a vector. Outputs and inputs that fill no vector and no pack are
// zeros. The outputs before `half` and the others have panels, and ends, of their own, so that two threads have equally
// many. `scales` and `sums` are for int8, `bias` where there is one; all of them have an entry for each of a panel's.
// What a product gives, bias included, is multiplied with `by`. Weights in blocks have panels of WIDTH outputs, each of a type
// of its own: see `block_products.h`.
struct Matrix {
    const void* weight;
    const int64_t* panels;  // [out / WIDTH, 2] of weights in blocks: where each begins, in bytes, and ggml's number of its type
    const float* scales;
    const int32_t* sums;
    const float* bias;
    int64_t out, in, half;
    float by;
    int64_t file_type;  // 1 + ggml's number of the type of `weight`, where that is rows [out, in] of a mapped file; 0 otherwise
};

struct GatedMLP {
    Matrix gate, up, down;
};

struct Layer {
    const float* input_norm;     // [hidden], like the other three; each may be missing
    Matrix qkv;
    const float* head_norm;      // [H + K, D] or none: of each head, or of all queries and of all keys
    Matrix output;
    const float* output_norm;    // of what attention adds
    const float* mlp_norm;
    Matrix router;               // [E, hidden], float; without it all rows take the first MLP
    const GatedMLP* mlps;        // experts are in blocks or of the embedding's numbers
    const float* down_norm;      // of what the MLP adds
    const float* sinks;          // [H] scores that take probability and give nothing, or none
    int64_t window;              // keys that a row sees at most, its own included; 0 all
    int64_t ahead;               // keys behind its own that a row sees, as far as the step's `ends` say that there are any
    int64_t rotation;            // which of the step's tables turns queries and keys; -1 none
    float scale;                 // of scores
};

struct Model {
    const Layer* layers;
    Matrix embedding;  // [V, hidden], of its own numbers, in blocks, or left in its file
    const float* norm;
    Matrix head;       // of its own numbers, too, where only the layers are in blocks
    int64_t num_layers, hidden, num_heads, num_key_heads, head_size;
    int64_t num_turned;         // R: the first of a head's numbers, pairs side by side
    int64_t mlp;                // the widest
    int64_t num_experts;        // of a layer, 0 without any
    int64_t num_taken;          // experts of a row, 1 without any
    int64_t activation;         // 0 SiLU, 1 GELU by tanh, 2 a SiLU of limited numbers
    int64_t norms_whole_width;  // head norms are of all queries and of all keys
    int64_t norms_outputs;      // some layers have norms of what they add
    int64_t shares_sum_to_one;  // of the experts that a row takes
    float epsilon;
    float embedding_scale;
    float score_cap, logit_cap;  // 0 none
    float steepness, limit;      // of the third activation
};

struct Row {
    int64_t token, position, slot;  // where its key is written; -1 nowhere
    int64_t first_slot;             // of its sequence's keys where they lie in one piece
    const int64_t* slots;           // of each key, where only `block` of them together do
    int64_t num_in_order;           // that many first of them do; a drafted node's others are its path's, one by one
};

struct Step {
    const Row* rows;
    const int64_t* wanted;
    int64_t num_rows, num_wanted, num_slots, block, most_keys, num_threads;
    void* cache;           // [layers, 2, K, slots * D]: keys in panels of WIDTH slots [D, WIDTH], values as they are
    const float* const* turns;  // tables [positions, R/2, 2]
    float* scratch;        // as many as `scratch_floats` says
    float* logits;         // [num_wanted, V]
    double* waited;        // adds the seconds that the one of several threads that waited most did for the others
    const int64_t* taps;   // layers whose outputs are wanted; behind the last one is the final norm
    int64_t num_taps;
    float* states;         // [num_rows, num_taps, hidden]: these outputs
    const float* residual;  // [num_rows, hidden] and
    const float* inputs;    // [num_rows, in]: of a draft head, in place of embeddings and, or none, of what the first
                            // layer's attention reads
    const int64_t* ends;    // [num_rows] keys of each row's sequence, where layers look ahead; or none
    int64_t only_files;     // keys and values of the inputs go to the cache, the same inputs in every layer, and that is all
};

struct Chance {            // how a sequence's continuation is drawn
    double temperature;    // 0 takes the likeliest tokens
    double top_p, min_p;   // 1 and 0 leave all
    int64_t top_k;         // 0 leaves all
};
}

namespace {

// Kinds of weights. PACK of a row's inputs, 32 bits of them, meet as many weights of each of a vector's outputs at once.
struct Float32 {
    using Weight = float;
    using Input = float;
    static constexpr long PACK = 1;
    static constexpr long TILES_FROM = NEVER;
    typedef Floats Vector;
    typedef Floats Sums;
    static Vector load_weights(const float* from) { return load(from); }
    static Vector pack_of(const float* x) { return spread(*x); }
    static Sums add(Sums sums, Vector w, Vector x) { return multiply_add(w, x, sums); }
    static Floats values(Floats sums, const Matrix&, long, float) { return sums; }
    static float prepare(const float* row, long size, float* out) {
        std::memcpy(out, row, size * sizeof(float));
        return 1.0f;
    }
};

struct BFloat16 {
    using Weight = uint16_t;
    static constexpr long PACK = 2;
    static constexpr long TILES_FROM = BFLOAT16_TILES;
    typedef Floats Sums;
#if defined(__AVX512BF16__)
    using Input = uint16_t;
    typedef __m512bh Vector;
    static Vector load_weights(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Vector pack_of(const uint16_t* x) { return (__m512bh)spread_bits(x); }
    static Sums add(Sums sums, Vector w, Vector x) { return (Sums)_mm512_dpbf16_ps((__m512)sums, w, x); }
#else
    using Input = float;
    struct Vector { Floats low, high; };
    static Vector load_weights(const uint16_t* from) {
        const Ints both = *(const Ints*)from;
        return {(Floats)(both << 16), (Floats)(both & int32_t(0xffff0000))};
    }
    static Vector pack_of(const float* x) { return {spread(x[0]), spread(x[1])}; }
    static Sums add(Sums sums, const Vector& w, const Vector& x) {
        return multiply_add(w.high, x.high, multiply_add(w.low, x.low, sums));
    }
#endif
    static Floats values(Floats sums, const Matrix&, long, float) { return sums; }
    static void keep(uint16_t* to, uint16_t bits) { *to = bits; }
    static void keep(float* to, uint16_t bits) { *to = float_of(bits); }
    static float prepare(const float* row, long size, Input* out) {
        for (long i = 0; i < size; i++) keep(out + i, bf16_of(row[i]));
        if (size % PACK) out[size] = 0;
        return 1.0f;
    }
};

// Whole numbers; a row's have ZERO for 0, where they are unsigned 128, which the sums of a weight's take off again.
struct Int8 {
    using Weight = int8_t;
    static constexpr long PACK = 4;
    static constexpr long TILES_FROM = INT8_TILES;
    typedef Ints Sums;
#if defined(__ARM_FEATURE_DOTPROD)
    using Input = int8_t;
    static constexpr int32_t ZERO = 0;
    static constexpr bool IS_PAIRED = false;
    typedef int8x16_t Vector;
    static Vector load_weights(const int8_t* from) { return vld1q_s8(from); }
    static Vector pack_of(const int8_t* x) { return (int8x16_t)spread_bits(x); }
    static Sums add(Sums sums, Vector w, Vector x) { return (Sums)vdotq_s32((int32x4_t)sums, w, x); }
#elif HAS_BYTE_PRODUCTS
    using Input = uint8_t;
    static constexpr int32_t ZERO = 128;
    static constexpr bool IS_PAIRED = false;
    typedef Ints Vector;
    static Vector load_weights(const int8_t* from) { return *(const Ints*)from; }
    static Vector pack_of(const uint8_t* x) { return spread_bits(x); }
    static Sums add(Sums sums, Vector w, Vector x) { return add_products(sums, x, w); }
#else
    using Input = int16_t;
    static constexpr int32_t ZERO = 128;
    static constexpr bool IS_PAIRED = true;  // even inputs of a pack come before the odd ones
    struct Vector { Ints even, odd; };  // a pack's weights, pairs of 16 bits
    static Vector load_weights(const int8_t* from) {
        const Shorts all = *(const Shorts*)from;
        return {(Ints)(all << 8 >> 8), (Ints)(all >> 8)};
    }
    static Vector pack_of(const int16_t* x) { return {spread_bits(x), spread_bits(x + 2)}; }
    static Sums add(Sums sums, const Vector& w, const Vector& x) {
        return sums + pairs(w.even, x.even) + pairs(w.odd, x.odd);
    }
    static Ints pairs(Ints w, Ints x) {  // their sums of products
#if defined(__AVX512BW__)
        return (Ints)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
        return (Ints)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
        return (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
    }
#endif
    static Floats values(Ints sums, const Matrix& m, long o, float largest) {
        Ints taken;
        std::memcpy(&taken, m.sums + o, sizeof taken);
        return __builtin_convertvector(sums - ZERO * taken, Floats) * load(m.scales + o) * largest;
    }
    static float prepare(const float* row, long size, Input* out) {
        int32_t bits = 0;  // of sizes, which are ordered as they are; what is no number is the largest, and is heard of
        for (long i = 0; i < size; i++) {
            int32_t some;
            std::memcpy(&some, row + i, 4);
            bits = std::max(bits, some & 0x7fffffff);
        }
        float largest;
        std::memcpy(&largest, &bits, 4);
        const float scale = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (long i = 0; i < size; i++) out[i] = Input(int32_t(row[i] * scale + 128.5f) + (ZERO - 128));
        for (long i = size; i % PACK; i++) out[i] = 0;
        for (long i = 0; IS_PAIRED && i < size; i += PACK) std::swap(out[i + 1], out[i + 2]);
        return largest;
    }
};

#include "block_products.h"
#include "block_tiles.h"

// Inputs as an `InputRow` has them, times weights in blocks or in plain numbers of a file's own.
struct Blocks {
    using Input = int32_t;  // words of an `InputRow`
    static constexpr long PACK = BLOCK_INPUTS;
    static constexpr long TILES_FROM = BLOCK_TILES;
    static float prepare(const float* row, long size, Input* out) {
        prepare_inputs(row, size, out);
        return 1.0f;
    }
};

constexpr long SHARED = 8;  // rows whose inputs several threads prepare together, at least
constexpr long BLOCK = 8;  // rows of a sequence that read its keys and values together, at most

// What a forward writes on the way: floats that all threads share, and each one's own.
struct Room {
    long qkv, attended, gate_up, added, routed, shared, row, scores, score_pitch, stream, taken, own;

    Room(const Model& m, const Step& s) {
        const long n = s.num_rows, width = m.num_heads * m.head_size;
        const long read = m.num_layers ? long(m.layers[0].qkv.in) : 0;
        const long widest = std::max({long(m.hidden), width, long(m.mlp), read});
        // Of a product, with what fills a pack, and the largest; those for blocks are there in several forms.
        const long inputs = std::is_same_v<WEIGHTS, Blocks> ? room_for_inputs(n, widest) : n * (widest + 2);
        qkv = n * m.hidden;
        attended = qkv + n * (width + 2 * m.num_key_heads * m.head_size);
        gate_up = attended + n * width;
        added = gate_up + n * 2 * m.mlp * m.num_taken;
        routed = added + (m.norms_outputs ? n * m.hidden : 0);
        shared = routed + n * m.num_experts;
        row = inputs;
        scores = row + widest + 32;
        score_pitch = (s.most_keys + 31) / WIDTH * WIDTH;
        stream = scores + BLOCK * m.num_heads / m.num_key_heads * score_pitch + 64;
        taken = stream + (m.norms_outputs ? n * m.hidden : 0);
        own = taken + (m.num_experts ? inputs : 0);
    }
};

struct Part { long begin, end; };

Part part_of(long count, int thread, int threads) { return {count * thread / threads, count * (thread + 1) / threads}; }

// How many outputs there are together, `most` or half or a quarter of them, from one on before an end.
inline long width_at(long o, long end, long most) {
    while (o + most >= end + LEAST) most /= 2;
    return most;
}

// The panel where an output is.
struct Panel {
    long begin, width;

    Panel(const Matrix& m, long o) {
        const long first = o < m.half ? 0 : m.half, end = o < m.half ? m.half : m.out;
        begin = first + (o - first) / PANEL * PANEL;
        while (begin + (width = width_at(begin, end, PANEL)) <= o) begin += width;
    }
};

// A thread's part of a matrix' outputs: whole panels, and whole units of several if they are parted by these; it begins
// where the nearest of them does.
Part part_of(const Matrix& m, int thread, int threads, long unit = PANEL) {
    const auto begin = [&](long t) {
        const long o = m.out * t / threads, first = o < m.half ? 0 : m.half, end = o < m.half ? m.half : m.out;
        return t < threads ? std::min(end, first + (o - first + unit / 2) / unit * unit) : end;
    };
    return {begin(thread), begin(thread + 1)};
}

// V vectors of outputs, W together, times R rows of inputs, `in` of them with what fills the last pack.
template <class Kind, int R, int V, long W>
inline void multiply(const typename Kind::Weight* w, const typename Kind::Input* x, long in,
                     typename Kind::Sums (&found)[R][V]) {
    constexpr bool KEEPS = R > 1 && R * V + V + 1 <= REGISTERS;
    typename Kind::Sums sums[R][V] = {};
    for (long i = 0; i < in; i += Kind::PACK) {
        typename Kind::Vector weights[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            constexpr long S = std::min(W, PANEL);
            const auto* const from = w + v * WIDTH / S * S * in + i * S + v * WIDTH % S * Kind::PACK;
            weights[v] = Kind::load_weights(from);
            if (KEEPS) weights[v] = kept(weights[v]);
            if (FETCHES && R > 1) __builtin_prefetch(from + AHEAD / sizeof *from);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const auto pack = kept(Kind::pack_of(x + r * in + i));
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[r][v] = Kind::add(sums[r][v], weights[v], pack);
        }
    }
    std::memcpy(found, sums, sizeof sums);
}

// Puts a product's values, of outputs from o on, where they belong or adds them to what is there.
template <bool ADDS>
inline void write(const Matrix& m, Floats values, long o, float by, float* to) {
    if (m.bias) values += load(m.bias + o);
    values *= by;
    const long count = std::min(WIDTH, long(m.out) - o);
    if (count == WIDTH) {
        if (ADDS) values += load(to);
        std::memcpy(to, &values, sizeof values);
    } else {
        for (long i = 0; i < count; i++) to[i] = ADDS ? to[i] + values[i] : values[i];
    }
}

// x [n, in] times a matrix, which goes to rows of numbers or is added to them.
template <class Kind>
struct Product {
    const Matrix& m;
    const typename Kind::Input* x;
    const float* largest;
    long n, in;
    const int32_t* places = nullptr;  // the rows' in what it is added to; without it they are in order
    const float* shares = nullptr;    // what each row is multiplied with

    // R rows with the W outputs from o on.
    template <int R, long W, bool ADDS>
    void panel(long row, long o, float* to, long pitch) const {
        constexpr long MOST = SUMS / R < 4 ? 2 : SUMS / R < 8 ? 4 : 8, V = std::min(MOST, W / WIDTH);
        constexpr long S = std::min(W, PANEL);
        const auto* const weights = (const typename Kind::Weight*)m.weight + o * in;
        for (long first = 0; first < W; first += V * WIDTH) {
            typename Kind::Sums sums[R][V];
            const auto* const from = weights + first / S * S * in + first % S * Kind::PACK;
            multiply<Kind, R, V, W>(from, x + row * in, in, sums);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++) put<ADDS>(sums[r][v], row + r, o + first + v * WIDTH, to, pitch);
        }
    }

    template <bool ADDS>
    void put(typename Kind::Sums sums, long row, long o, float* to, long pitch) const {
        const float by = shares ? m.by * shares[row] : m.by;
        write<ADDS>(m, Kind::values(sums, m, o, largest[row]), o, by, to + (places ? places[row] : row) * pitch + o);
    }

#if defined(__AMX_TILE__)
    // As tiles: W outputs from o on, of two groups of rows at once and then of one that is left.
    template <long W, bool ADDS>
    void tiles(long o, float* to, long pitch) const {
        const long size = group_size(n), packs = in / Kind::PACK;
        const auto* const weights = (const typename Kind::Weight*)m.weight + o * in;
        alignas(64) typename Kind::Sums sums[2 * TILE_ROWS * 4];
        long row = 0;
        for (; row + size < n; row += 2 * size) {
            constexpr int V = W > TILE_ROWS ? 2 : 1;
            for (long first = 0; first < W; first += V * WIDTH) {
                multiply_groups<V, W>(weights + first * Kind::PACK, x + row * in, size, in, packs, sums);
                for (long r = 0; r < 2 * size && row + r < n; r++) finish<V, W, ADDS>(sums + 4 * r, row + r, o, first, to, pitch);
            }
        }
        if (row >= n) return;
        constexpr int V = W / WIDTH;
        multiply_group<V, W>(weights, x + row * in, in, packs, sums);
        for (long r = 0; r < size && row + r < n; r++) finish<V, W, ADDS>(sums + 4 * r, row + r, o, 0, to, pitch);
    }

    // What fills no tile, and where the sums of V vectors of a row's outputs go.
    template <int V, long W, bool ADDS>
    void finish(const typename Kind::Sums* sums, long row, long o, long first, float* to, long pitch) const {
        const long packs = in / Kind::PACK;
        const auto* const weights = (const typename Kind::Weight*)m.weight + o * in + first * Kind::PACK;
        for (int v = 0; v < V; v++) {
            typename Kind::Sums all = sums[v];
            for (long i = packs / TILE_PACKS * TILE_PACKS * Kind::PACK; i < in; i += Kind::PACK)
                all = Kind::add(all, Kind::load_weights(weights + i * W + v * WIDTH * Kind::PACK), Kind::pack_of(x + row * in + i));
            put<ADDS>(all, row, o + first + v * WIDTH, to, pitch);
        }
    }
#endif

    template <long W, bool ADDS>
    void rows(long o, float* to, long pitch) const {
#if defined(__AMX_TILE__)
        if constexpr (Kind::TILES_FROM < NEVER)
            if (n >= Kind::TILES_FROM) return tiles<W, ADDS>(o, to, pitch);
#endif
        long row = 0;
        for (; row + ROWS <= n; row += ROWS) panel<ROWS, W, ADDS>(row, o, to, pitch);
        switch (n - row) {
            case 5: return panel<5, W, ADDS>(row, o, to, pitch);
            case 4: return panel<4, W, ADDS>(row, o, to, pitch);
            case 3: return panel<3, W, ADDS>(row, o, to, pitch);
            case 2: return panel<2, W, ADDS>(row, o, to, pitch);
            case 1: return panel<1, W, ADDS>(row, o, to, pitch);
        }
    }

    template <bool ADDS>
    void go(Part part, float* to, long pitch) const {
        for (long o = part.begin, width; o < part.end; o += width) {
            width = PANEL > LEAST ? Panel(m, o).width : width_at(o, part.end, TILE);  // several of narrow panels
            switch (width) {
                case TILE: rows<TILE, ADDS>(o, to, pitch); break;
                case TILE / 2: rows<TILE / 2, ADDS>(o, to, pitch); break;
                case LEAST: rows<LEAST, ADDS>(o, to, pitch); break;
            }
        }
    }

    void into(Part part, float* to, long pitch) const { go<false>(part, to, pitch); }
    void onto(Part part, float* to, long pitch) const { go<true>(part, to, pitch); }
};

template <>
struct Product<Blocks> {
    const Matrix& m;
    int32_t* x;
    const float* ones;
    long n, words;
    const int32_t* places = nullptr;  // as above
    const float* shares = nullptr;

    template <bool ADDS>
    void go(Part part, float* to, long pitch) const {
        const BlockInputs inputs(x, n, m.in);
        Floats sums[PANEL_ROWS];
        for (long o = part.begin; o < part.end; o += WIDTH) {
            const int64_t* const place = m.panels + 2 * (o / WIDTH);
            const auto* const panel = (const uint8_t*)m.weight + place[0];
            for (long row = 0, count = 0; row < n; row += count) {
                with_layout(place[1], [&](auto layout) { count = inputs.multiply<decltype(layout)>(panel, row, sums); });
                for (long r = row; r < row + count; r++) {
                    const float by = shares ? m.by * shares[r] : m.by;
                    write<ADDS>(m, sums[r - row], o, by, to + (places ? places[r] : r) * pitch + o);
                }
            }
        }
    }

    void into(Part part, float* to, long pitch) const { go<false>(part, to, pitch); }
    void onto(Part part, float* to, long pitch) const { go<true>(part, to, pitch); }
};

// Inputs of a product: n rows, which all threads share or each has for itself.
template <class Kind>
struct Inputs {
    typename Kind::Input* x;
    float* largest;
    float* row;  // a thread's own
    long n;

    void prepare(long r, const float* from, long size) {
        largest[r] = Kind::prepare(from, size, x + r * length(size));
        if constexpr (std::is_same_v<Kind, Blocks>) BlockInputs(x, n, size).tile(r);
    }

    void normed(long r, const float* from, const float* weight, long size, float epsilon) {
        if (weight) norm(from, weight, size, epsilon, row);
        prepare(r, weight ? row : from, size);
    }

    void take(long r, const Inputs& others, long other, long size) {
        std::copy_n(others.x + other * length(size), length(size), x + r * length(size));
        largest[r] = others.largest[other];
        if constexpr (std::is_same_v<Kind, Blocks>) BlockInputs(x, n, size).tile(r);
    }

    static void norm(const float* x, const float* weight, long size, float epsilon, float* out) {
        Floats squares = {};
        long i = 0;
        for (; i + WIDTH <= size; i += WIDTH) squares = multiply_add(load(x + i), load(x + i), squares);
        float total = sum_of(squares);
        for (; i < size; i++) total += x[i] * x[i];
        const float by = 1.0f / std::sqrt(total / float(size) + epsilon);
        for (i = 0; i < size; i++) out[i] = x[i] * by * weight[i];
    }

    static long length(long size) {  // of a row, in `Input`s
        const long packs = (size + Kind::PACK - 1) / Kind::PACK;
        return std::is_same_v<Kind, Blocks> ? InputRow::words(packs) : packs * Kind::PACK;
    }

    Product<Kind> times(const Matrix& m) const { return {m, x, largest, n, length(m.in)}; }
};

constexpr int TOGETHER = 4;  // panels of keys

// Q queries with some panels of keys, to sums [Q, TOGETHER].
template <int Q, class Number>
__attribute__((noinline)) void dots(const float* const* queries, const Number* const* panels, long size, float scale,
                                    Floats* found) {
    const Number *a = panels[0], *b = panels[1], *c = panels[2], *d = panels[3];
    const float* each[Q];
    std::copy(queries, queries + Q, each);
    Floats sums[Q][TOGETHER] = {};
    for (long i = 0; i < size; i++, a += WIDTH, b += WIDTH, c += WIDTH, d += WIDTH) {
        const Floats keys[TOGETHER] = {kept(floats_of(a)), kept(floats_of(b)), kept(floats_of(c)), kept(floats_of(d))};
        if (FETCHES)
            for (const Number* panel : {a, b, c, d}) __builtin_prefetch(panel + TOGETHER * WIDTH * size);
        for (int q = 0; q < Q; q++)
            for (int p = 0; p < TOGETHER; p++) sums[q][p] = multiply_add(spread(each[q][i]), keys[p], sums[q][p]);
    }
    std::memcpy(found, sums, sizeof sums);
    for (int i = 0; i < Q * TOGETHER; i++) found[i] *= scale;
}

inline void soften(float* scores, long count, float sink) {  // to probabilities
    const long padded = (count + WIDTH - 1) / WIDTH * WIDTH;
    std::fill(scores + count, scores + padded, -INFINITY);
    Floats most = load(scores);
    for (long i = WIDTH; i < padded; i += WIDTH) {
        const Floats some = load(scores + i);
        most = some > most ? some : most;
    }
    float largest = most[0];
    for (long j = 1; j < WIDTH; j++) largest = most[j] > largest ? most[j] : largest;
    if (sink > largest) largest = sink;
    Floats sums = {};
    for (long i = 0; i < padded; i += WIDTH) {
        const Floats some = load(scores + i);
        const Floats e = some == -INFINITY ? Floats{} : exponential(some - largest);
        std::memcpy(scores + i, &e, sizeof e);
        sums += e;
    }
    const float by = 1.0f / (sum_of(sums) + (sink == -INFINITY ? 0.0f : std::exp(sink - largest)));
    for (long i = 0; i < padded; i += WIDTH) {
        const Floats some = load(scores + i) * by;
        std::memcpy(scores + i, &some, sizeof some);
    }
}

// Means of values by Q queries' weights, J vectors of each; in four sums at once, which need not wait for each other.
template <int Q, int J, class Number, class At>
inline void mean(const float* const (&weights)[Q], long begin, const long (&counts)[Q], At value_at,
                 float* const (&to)[Q]) {
    Floats sums[Q][4][J] = {};
    long together = begin;  // a multiple of four
    for (; together + 4 <= counts[0]; together += 4)
        for (int u = 0; u < 4; u++) {
            const Number* const value = value_at(together + u);
            if (FETCHES) __builtin_prefetch(value + VALUES_AHEAD / sizeof(Number));
            for (int j = 0; j < J; j++) {
                const Floats some = kept(floats_of(value + j * WIDTH));
                for (int q = 0; q < Q; q++)
                    sums[q][u][j] = multiply_add(spread(weights[q][together + u]), some, sums[q][u][j]);
            }
        }
    Floats left[Q][4][J];
    std::memcpy(left, sums, sizeof left);
    for (int q = 0; q < Q; q++)
        for (int j = 0; j < J; j++) {
            for (long t = together; t < counts[q]; t++) {
                Floats& sum = left[q][t < counts[q] / 4 * 4 ? t % 4 : 0][j];
                sum = multiply_add(spread(weights[q][t]), floats_of(value_at(t) + j * WIDTH), sum);
            }
            const Floats total = (left[q][0][j] + left[q][1][j]) + (left[q][2][j] + left[q][3][j]);
            std::memcpy(to[q] + j * WIDTH, &total, sizeof total);
        }
}

// Pairs of numbers as complex ones, by complex ones.
inline void rotate(float* pairs, const float* by, long size) {
    long j = 0;
#if defined(__AVX512F__)
    for (; j + WIDTH <= size; j += WIDTH) {
        const __m512 some = _mm512_loadu_ps(pairs + j), turn = _mm512_loadu_ps(by + j);
        const __m512 along = _mm512_mul_ps(some, _mm512_moveldup_ps(turn));
        const __m512 across = _mm512_mul_ps(_mm512_permute_ps(some, 0xb1), _mm512_movehdup_ps(turn));
        const __m512 turned = _mm512_mask_sub_ps(_mm512_add_ps(along, across), 0x5555, along, across);
        _mm512_storeu_ps(pairs + j, turned);
    }
#elif defined(__AVX2__)
    for (; j + WIDTH <= size; j += WIDTH) {
        const __m256 some = _mm256_loadu_ps(pairs + j), turn = _mm256_loadu_ps(by + j);
        const __m256 along = _mm256_mul_ps(some, _mm256_moveldup_ps(turn));
        const __m256 across = _mm256_mul_ps(_mm256_permute_ps(some, 0xb1), _mm256_movehdup_ps(turn));
        _mm256_storeu_ps(pairs + j, _mm256_addsub_ps(along, across));
    }
#endif
    for (; j < size; j += 2) {
        const float a = pairs[j], b = pairs[j + 1], c = by[j], d = by[j + 1];
        pairs[j] = a * c - b * d;
        pairs[j + 1] = a * d + b * c;
    }
}

// How many rows of n to put into a block, so that threads have equally many of each head's blocks.
long block_size(long n, long num_heads, long threads) {
    const long multiple = threads / std::gcd(num_heads, threads);
    const long num_blocks = ((n + BLOCK - 1) / BLOCK + multiple - 1) / multiple * multiple;
    return (n + num_blocks - 1) / num_blocks;
}

// Neighbouring rows of a sequence, `most` of them at most.
std::vector<Part> blocks_of(const Step& s, long most) {
    std::vector<Part> found;
    for (long r = 0; r < s.num_rows; r++) {
        const bool goes_on = r && found.back().end - found.back().begin < most && s.rows[r].slots == s.rows[r - 1].slots &&
                             s.rows[r].first_slot == s.rows[r - 1].first_slot &&
                             s.rows[r].position == s.rows[r - 1].position + 1;
        if (goes_on) found.back().end++;
        else found.push_back({r, r + 1});
    }
    return found;
}

// A block's queries, G of each row, against the keys of one head. `slots` of them lie in one piece in the cache, or all.
template <class Number>
struct Attention {
    const Row* rows;
    long num_rows, groups, size, slots;
    const Number *keys, *values;
    long window;         // 0 without one
    long ahead;
    const int64_t* ends;  // of the rows, or none
    const float* sinks;  // of the G queries of each row, or none
    float scale, cap;
    float* scores;  // [rows, G, pitch]
    long pitch;

    // The first key that a row sees.
    long begin_of(long row) const { return window ? std::max(0l, long(rows[row].position) + 1 - window) : 0; }

    // The first key that it does not see any more.
    long end_of(long row) const {
        const long own = rows[row].position + 1;
        return ends ? std::min(own + ahead, long(ends[row])) : own;
    }

    long slot(long t) const { return rows->slots ? rows->slots[t] : rows->first_slot + t; }
    long run(long t) const {  // how many follow in one piece
        if (!rows->slots) return WIDTH;
        return t < rows->num_in_order ? std::min(slots - t % slots, long(rows->num_in_order) - t) : 1;
    }

    // Queries [rows, G, D], `row_pitch` from row to row; as many keys as the last row sees.
    void score(const float* queries, long row_pitch) const {
        const long count = end_of(num_rows - 1);
        const auto at_query = [=](long q) { return queries + q / groups * row_pitch + q % groups * size; };
        for (long t = begin_of(0); t < count;) {
            const Number* panels[TOGETHER];
            long lanes[TOGETHER], starts[TOGETHER + 1] = {t};
            for (int p = 0; p < TOGETHER; p++) {
                const long at = slot(std::min(t, count - 1));
                lanes[p] = at % WIDTH;
                panels[p] = keys + (at - lanes[p]) * size;
                t += std::min({run(t), WIDTH - lanes[p], count - t});
                starts[p + 1] = t;
            }
            long q = 0;
            constexpr int MOST = sizeof(Number) < sizeof(float) ? QUERIES_OF_HALVES : QUERIES;
            for (; q + MOST <= num_rows * groups; q += MOST) write<MOST>(q, at_query, panels, lanes, starts);
            for (; q + QUERIES <= num_rows * groups; q += QUERIES) write<QUERIES>(q, at_query, panels, lanes, starts);
            for (; q + 2 <= num_rows * groups; q += 2) write<2>(q, at_query, panels, lanes, starts);
            for (; q < num_rows * groups; q++) write<1>(q, at_query, panels, lanes, starts);
        }
    }

    template <int Q, class At>
    void write(long first, At at_query, const Number* const* panels, const long* lanes, const long* starts) const {
        const float* each[Q];
        for (int q = 0; q < Q; q++) each[q] = at_query(first + q);
        Floats found[Q][TOGETHER];
        dots<Q>(each, panels, size, scale, found[0]);
        for (int q = 0; q < Q; q++)
            for (int p = 0; p < TOGETHER; p++) {
                float* const to = scores + (first + q) * pitch + starts[p];
                const long taken = starts[p + 1] - starts[p];
                if (taken == WIDTH) std::memcpy(to, &found[q][p], sizeof found[q][p]);
                else for (long j = 0; j < taken; j++) to[j] = found[q][p][lanes[p] + j];
            }
    }

    // What the queries find, [rows, G, D] likewise; a row sees what is at or before its position, as far
    // back as its window goes, and what its layer lets it see ahead.
    void find(float* out, long row_pitch) const {
        const auto to = [=](long q) { return out + q / groups * row_pitch + q % groups * size; };
        long q = 0;
        for (; q + WEIGHED <= num_rows * groups; q += WEIGHED) soften_and_find<WEIGHED>(q, to);
        for (; q + 2 <= num_rows * groups; q += 2) soften_and_find<2>(q, to);
        if (q < num_rows * groups) soften_and_find<1>(q, to);
    }

    template <int Q, class To>
    void soften_and_find(long first, To at_out) const {
        const float* own[Q];
        long counts[Q];
        float* to[Q];
        const long from = begin_of(first / groups) / 4 * 4;  // all of them add up from here on, zeros before their own keys
        for (int q = 0; q < Q; q++) {
            float* const each = scores + (first + q) * pitch;
            const long begin = begin_of((first + q) / groups);
            const long count = end_of((first + q) / groups);
            if (cap > 0.0f) cap_all(each + begin, count - begin, cap);
            soften(each + begin, count - begin, sinks ? sinks[(first + q) % groups] : -INFINITY);
            std::fill(each + from, each + begin, 0.0f);
            own[q] = each;
            counts[q] = count;
            to[q] = at_out(first + q);
        }
        const int64_t* const slots = rows->slots;
        const Number* const first_value = values + rows->first_slot * size;
        if (slots) means<Q>(own, from, counts, [=](long t) { return values + slots[t] * size; }, to);
        else means<Q>(own, from, counts, [=](long t) { return first_value + t * size; }, to);
    }

    template <int Q, class At>
    void means(const float* const (&own)[Q], long begin, const long (&counts)[Q], At value_at, float* (&to)[Q]) const {
        long i = 0;
        const auto part_at = [&](long t) { return value_at(t) + i; };
        const auto go = [&](auto width) {
            constexpr int J = decltype(width)::value;
            for (; i + J * WIDTH <= size; i += J * WIDTH) {
                mean<Q, J, Number>(own, begin, counts, part_at, to);
                for (float*& each : to) each += J * WIDTH;
            }
        };
        go(std::integral_constant<int, (MEANS + Q - 1) / Q>());
        go(std::integral_constant<int, (2 + Q - 1) / Q>());
        go(std::integral_constant<int, 1>());
        for (; i < size; i++)
            for (int q = 0; q < Q; q++) {
                float sum = 0.0f;
                for (long t = begin; t < counts[q]; t++) sum += own[q][t] * float_of(*part_at(t));
                *to[q]++ = sum;
            }
    }
};

// One row of a matrix, scaled.
template <class Number>
void plain_row(const Matrix& m, long row, float scale, float* to) {
    constexpr long PACK = 4 / sizeof(Number);
    const Panel panel(m, row);
    const long size = m.in;
    const Number* const from = (const Number*)m.weight + panel.begin * ((size + PACK - 1) / PACK * PACK);
    for (long i = 0; i < size; i++)
        to[i] = float_of(from[(i / PACK * panel.width + row - panel.begin) * PACK + i % PACK]) * scale;
}

void plain_row(const Model& m, const Matrix& of, long row, float scale, float* to) {
    if (of.file_type) {
        with_layout(of.file_type - 1, [&](auto layout) {
            file_row<decltype(layout)>((const uint8_t*)of.weight, row, of.in, scale, to);
        });
    } else if (of.panels) {
        const int64_t* const place = of.panels + 2 * (row / WIDTH);
        with_layout(place[1], [&](auto layout) {
            plain_row<decltype(layout)>((const uint8_t*)of.weight + place[0], row % WIDTH, of.in, scale, to);
        });
    } else {
        plain_row<NUMBER>(of, row, scale, to);
    }
}

// What an MLP's gate lets through.
template <class Some>
inline Some gated(Some gate, Some up, const Model& m) {
    if (m.activation == 0) return gate / (exponential(Some{} - gate) + 1.0f) * up;
    if (m.activation == 1) {  // 0.5 (1 + tanh y) is 1 / (1 + e^-2y)
        const Some y = gate * (0.7978845608028654f + 0.7978845608028654f * 0.044715f * gate * gate);
        return gate / (exponential(Some{} - (y + y)) + 1.0f) * up;
    }
    const Some most = Some{} + m.limit, least = Some{} - m.limit;
    gate = gate > most ? most : gate;
    up = up > most ? most : up < least ? least : up;
    return gate / (exponential(Some{} - m.steepness * gate) + 1.0f) * (up + 1.0f);
}

double clock_seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Where the threads of a call wait for each other, five times in a layer: each says in a line of its own that it is there and
// looks for the others, for a while before it sleeps. OpenMP's own barrier asks the system to wake sleepers whether there
// are any or not, which a small model's forward feels.
class Meeting {
    static constexpr long SHORT = 64, LOOKS = 4096;  // before the time is taken, and before a thread sleeps
    struct alignas(64) Place { std::atomic<long> times{0}; };
    std::vector<Place> places;
    alignas(64) std::atomic<long> sleepers{0};
    std::mutex mutex;
    std::condition_variable awake;

public:
    explicit Meeting(long most) : places(most) {}

    // How many seconds this one of some threads waited, 0 if that was short.
    double wait(long thread, long threads) {
        const long now = places[thread].times.load(std::memory_order_relaxed) + 1;
        places[thread].times.store(now);
        long here = 0;  // of the first ones it is known
        const auto are_here = [&] {
            while (here < threads && places[here].times.load() >= now) here++;
            return here == threads;
        };
        if (are_here()) {
            if (sleepers.load()) {
                const std::lock_guard<std::mutex> lock(mutex);
                awake.notify_all();
            }
            return 0;
        }
        const auto look = [&](long times) {
            for (; times && !are_here(); times--) pause();
            return times > 0;
        };
        if (look(SHORT)) return 0;
        const double begin = clock_seconds();
        if (!look(LOOKS)) {
            std::unique_lock<std::mutex> lock(mutex);
            sleepers++;
            awake.wait(lock, are_here);
            sleepers--;
        }
        return clock_seconds() - begin;
    }
};

// One of the threads of a call.
struct Member {
    const int thread, threads;
    Meeting& meeting;
    double waited;

    void meet() { waited += meeting.wait(thread, threads); }
};

// Does a call's work on all of its threads.
template <class Work>
void together(const Step& s, Work work) {
    Meeting meeting(s.num_threads);
    double waited = 0;
#pragma omp parallel num_threads(int(s.num_threads)) reduction(max : waited)
    {
        Member member{omp_get_thread_num(), omp_get_num_threads(), meeting, 0};
        work(member);
        waited = member.waited;
    }
    *s.waited += waited;
}

// Logits of the inputs that were prepared for them: a thread's part.
template <class Kind>
void head(const Model& m, const Step& s, const Inputs<Kind>& inputs, Tiles& tiles, const Member& member) {
    if (s.num_wanted >= Kind::TILES_FROM) tiles.shape(group_size(s.num_wanted));
    const Part own = part_of(m.head, member.thread, member.threads);
    inputs.times(m.head).into(own, s.logits, m.head.out);
    if (m.logit_cap > 0.0f)
        for (long i = 0; i < s.num_wanted; i++)
            cap_all(s.logits + i * m.head.out + own.begin, own.end - own.begin, m.logit_cap);
}

// Logits of final hidden states [num_wanted, hidden].
template <class Kind>
void head(const Model& m, const Step& s, const float* hidden, const Member& member) {
    const Room room(m, s);
    float* const mine = s.scratch + room.shared + member.thread * room.own;
    Tiles tiles;
    Inputs<Kind> inputs{(typename Kind::Input*)mine, mine + room.row - s.num_rows, mine + room.row, s.num_wanted};
    for (long i = 0; i < s.num_wanted; i++) inputs.prepare(i, hidden + i * m.hidden, m.hidden);
    head(m, s, inputs, tiles, member);
}

// Puts the outputs of a layer where they are wanted: a thread's part of the rows.
template <class Write>
void tap(const Model& m, const Step& s, long layer, const float* x, const Member& member, Write write) {
    const Part rows = part_of(s.num_rows, member.thread, member.threads);
    for (long t = 0; t < s.num_taps; t++)
        if (s.taps[t] == layer)
            for (long r = rows.begin; r < rows.end; r++) write(x + r * m.hidden, s.states + (r * s.num_taps + t) * m.hidden);
}

// Which rows take which experts of a layer, expert by expert.
struct Routes {
    std::vector<int32_t> begins, rows, taken;  // begins [E + 1], the others [n * num_taken]
    std::vector<float> shares, taken_shares, chances;

    // By the rows' logits [n, E]: the largest of their softmax, of equals the first.
    void choose(const float* logits, long n, const Model& m) {
        const long E = m.num_experts, T = m.num_taken;
        chances.resize((E + WIDTH - 1) / WIDTH * WIDTH);
        rows.resize(n * T);
        shares.resize(n * T);
        taken.resize(n * T);
        taken_shares.resize(n * T);
        begins.assign(E + 1, 0);
        for (long r = 0; r < n; r++) choose_one(logits + r * E, E, T, m.shares_sum_to_one, &taken[r * T], &taken_shares[r * T]);
        for (const int32_t e : taken) begins[e + 1]++;
        std::partial_sum(begins.begin(), begins.end(), begins.begin());
        std::vector<int32_t> next(begins.begin(), begins.end() - 1);
        for (long i = 0; i < n * T; i++) {
            const long place = next[taken[i]]++;
            rows[place] = int32_t(i / T);
            shares[place] = taken_shares[i];
        }
    }

private:
    void choose_one(const float* logits, long E, long T, bool sum_to_one, int32_t* experts, float* its) {
        float largest = logits[0], total = 0.0f;
        for (long e = 1; e < E; e++) largest = logits[e] > largest ? logits[e] : largest;
        std::fill(std::copy_n(logits, E, chances.begin()), chances.end(), largest);
        for (long e = 0; e < E; e += WIDTH) {
            const Floats some = exponential(load(&chances[e]) - largest);
            std::memcpy(&chances[e], &some, sizeof some);
        }
        for (long e = 0; e < E; e++) total += chances[e];
        float taken_total = 0.0f;
        for (long t = 0; t < T; t++) {
            long best = std::find_if(chances.begin(), chances.begin() + E, [](float one) { return !(one < 0.0f); }) - chances.begin();
            for (long e = best + 1; e < E; e++)
                if (chances[e] > chances[best]) best = e;
            experts[t] = int32_t(best);
            taken_total += its[t] = chances[best];
            chances[best] = -1.0f;
        }
        for (long t = 0; t < T; t++) its[t] /= sum_to_one ? taken_total : total;
    }
};

// Weights that are kept as a model's own numbers.
template <class Number>
using PlainOf = std::conditional_t<sizeof(Number) == sizeof(float), Float32, BFloat16>;

// A thread's part of a forward; the others may still be busy with their logits.
template <class Kind, class Number>
class Pass {
    using Plain = PlainOf<Number>;
    const Model& m;
    const Step& s;
    Member& member;
    const Room room;
    const int thread, threads;
    const long n, D, H, K, heads, width, hidden;
    float* const shared;
    float *const qkv, *const attended, *const gate_up, *const added, *const routed, *const mine, *const scores;
    float* const x;  // the residual stream; each thread has its own where what is added to it has to be whole first
    const std::vector<Part> blocks;
    const bool shares_inputs;  // each thread prepares some of the rows: with many of them that is worth another meeting
    Tiles tiles;
    Inputs<Kind> inputs;
    Inputs<Plain> plain;
    Routes routes;

public:
    Pass(const Model& m, const Step& s, Member& member)
        : m(m), s(s), member(member), room(m, s), thread(member.thread), threads(member.threads), n(s.num_rows),
          D(m.head_size), H(m.num_heads), K(m.num_key_heads), heads(H + 2 * K), width(H * D), hidden(m.hidden),
          shared(s.scratch), qkv(shared + room.qkv), attended(shared + room.attended), gate_up(shared + room.gate_up),
          added(shared + room.added), routed(shared + room.routed), mine(shared + room.shared + thread * room.own),
          scores(mine + room.scores), x(m.norms_outputs ? mine + room.stream : shared),
          blocks(blocks_of(s, block_size(n, K, s.num_threads))), shares_inputs(threads > 1 && n >= SHARED),
          inputs(inputs_in<Kind>(shares_inputs ? shared + room.shared : mine, n)),
          plain(inputs_in<Plain>(shares_inputs ? shared + room.shared : mine, n)) {}

    void run() {
        const Part part = part_of(n, thread, threads);
        for (long r = part.begin; r < part.end; r++) {
            const long token = s.rows[r].token;
            if (s.residual) std::copy_n(s.residual + r * hidden, hidden, shared + r * hidden);
            else plain_row(m, m.embedding, token, m.embedding_scale, shared + r * hidden);
        }
        member.meet();
        if (x != shared) std::copy_n(shared, n * hidden, x);
        for (long l = 0; l < m.num_layers; l++) {
            const Layer& layer = m.layers[l];
            Number *const keys = (Number*)s.cache + l * 2 * K * s.num_slots * D, *const values = keys + K * s.num_slots * D;
            project(layer, l == 0, keys, values);
            if (s.only_files) continue;
            attend(layer, keys, values);
            if (layer.router.weight) take_experts(layer);
            else feed(layer);
            tap(m, s, l, x, member, [this](const float* from, float* to) { std::copy(from, from + hidden, to); });
        }
        tap(m, s, m.num_layers, x, member,
            [this](const float* from, float* to) { inputs.norm(from, m.norm, hidden, m.epsilon, to); });
        if constexpr (std::is_same_v<Kind, Blocks>)
            if (!m.head.panels) return logits<Plain>();
        logits<Kind>();
    }

private:
    template <class Some>
    void logits() {
        Inputs<Some> own = inputs_in<Some>(mine, s.num_wanted);
        for (long i = 0; i < s.num_wanted; i++) own.normed(i, x + s.wanted[i] * hidden, m.norm, hidden, m.epsilon);
        head(m, s, own, tiles, member);
    }

    template <class Some>
    Inputs<Some> inputs_in(float* place, long count) const {
        return {(typename Some::Input*)place, place + room.row - n, mine + room.row, count};
    }

    // Prepares all rows of inputs, a thread only its part where they are shared.
    template <class Prepare>
    void each_row(Prepare prepare) {
        const Part rows = shares_inputs ? part_of(n, thread, threads) : Part{0, n};
        for (long r = rows.begin; r < rows.end; r++) prepare(r);
        if (shares_inputs) member.meet();
    }

    template <class Some>
    void shape(long count) {
        if (count >= Some::TILES_FROM) tiles.shape(group_size(count));
    }

    // Queries of all rows, and their keys and values, which go to the cache.
    void project(const Layer& layer, bool is_first, Number* keys, Number* values) {
        shape<Kind>(n);
        const bool are_given = s.inputs && (is_first || s.only_files);
        each_row([&](long r) {
            if (are_given) inputs.prepare(r, s.inputs + r * layer.qkv.in, layer.qkv.in);
            else inputs.normed(r, x + r * hidden, layer.input_norm, hidden, m.epsilon);
        });
        Part own = part_of(layer.qkv, thread, threads, std::lcm(PANEL, D));
        if (s.only_files) own.begin = std::clamp(Panel(layer.qkv, width).begin, own.begin, own.end);  // some queries, too
        inputs.times(layer.qkv).into(own, qkv, heads * D);
        if (m.norms_whole_width) {
            member.meet();
            const Part rows = part_of(n, thread, threads);
            for (long r = rows.begin; r < rows.end; r++) {
                float* const row = qkv + r * heads * D;
                inputs.norm(row, layer.head_norm, width, m.epsilon, row);
                inputs.norm(row + width, layer.head_norm + width, K * D, m.epsilon, row + width);
                for (long h = 0; h < heads; h++) turn_and_file(layer, h, r, keys, values);
            }
        } else {
            for (long i = own.begin / D * n; i < own.end / D * n; i++) {  // a head of each row
                const long h = i / n, r = i % n;
                float* const head = qkv + (r * heads + h) * D;
                if (h < H + K && layer.head_norm) inputs.norm(head, layer.head_norm + h * D, D, m.epsilon, head);
                turn_and_file(layer, h, r, keys, values);
            }
        }
        member.meet();
    }

    void attend(const Layer& layer, const Number* keys, const Number* values) {
        const long num_blocks = long(blocks.size()), G = H / K;
        const Part tasks = part_of(num_blocks * K, thread, threads);
        for (long i = tasks.begin; i < tasks.end; i++) {
            const long k = i / num_blocks;
            const Part block = blocks[i % num_blocks];
            const Attention<Number> attention{
                s.rows + block.begin, block.end - block.begin, G, D, s.block,
                keys + k * s.num_slots * D, values + k * s.num_slots * D,
                layer.window, layer.ahead, s.ends ? s.ends + block.begin : nullptr, layer.sinks ? layer.sinks + k * G : nullptr, layer.scale, m.score_cap,
                scores, room.score_pitch};
            attention.score(qkv + (block.begin * heads + k * G) * D, heads * D);
            attention.find(attended + block.begin * width + k * G * D, width);
        }
        member.meet();
        each_row([&](long r) { inputs.prepare(r, attended + r * width, width); });
        add(layer.output, layer.output_norm);
    }

    // A head of a row: its rotation, and its place in the cache if it is a key or a value.
    void turn_and_file(const Layer& layer, long h, long r, Number* keys, Number* values) const {
        float* const head = qkv + (r * heads + h) * D;
        const long R = m.num_turned;
        if (h < H + K && layer.rotation >= 0) rotate(head, s.turns[layer.rotation] + s.rows[r].position * R, R);
        if (h < H || s.rows[r].slot < 0) return;
        const long slot = (h - H) % K * s.num_slots + s.rows[r].slot, lane = slot % WIDTH;
        if (h < H + K) for (long j = 0; j < D; j++) put(keys + (slot - lane) * D + j * WIDTH + lane, head[j]);
        else for (long j = 0; j < D; j++) put(values + slot * D + j, head[j]);
    }

    void feed(const Layer& layer) {
        const GatedMLP& mlp = layer.mlps[0];
        const long I = mlp.gate.out;
        each_row([&](long r) { inputs.normed(r, x + r * hidden, layer.mlp_norm, hidden, m.epsilon); });
        gate(inputs, mlp, gate_up);
        member.meet();
        each_row([&](long r) { inputs.prepare(r, gate_up + r * 2 * I, I); });
        add(mlp.down, layer.down_norm);
    }

    void take_experts(const Layer& layer) {
        if constexpr (std::is_same_v<Kind, Blocks>)
            if (layer.mlps->gate.panels) return take_experts(layer, inputs);
        take_experts(layer, plain);
    }

    // Each expert that some rows take is read once.
    template <class Some>
    void take_experts(const Layer& layer, Inputs<Some>& all) {
        Inputs<Float32> normed = inputs_in<Float32>(mine + room.taken, n);
        for (long r = 0; r < n; r++) normed.normed(r, x + r * hidden, layer.mlp_norm, hidden, m.epsilon);
        normed.times(layer.router).into(part_of(layer.router, thread, threads), routed, m.num_experts);
        each_row([&](long r) { all.prepare(r, normed.x + r * hidden, hidden); });
        member.meet();
        routes.choose(routed, n, m);
        Inputs<Some> taken = inputs_in<Some>(mine + room.taken, 0);
        const long I = layer.mlps[0].gate.out;
        each_taken<Some>([&](const GatedMLP& mlp, long begin, long count) {
            taken.n = count;
            for (long i = 0; i < count; i++) taken.take(i, all, routes.rows[begin + i], hidden);
            gate(taken, mlp, gate_up + begin * 2 * I);
        }, layer);
        member.meet();
        const Part part = part_of(layer.mlps[0].down, thread, threads);
        float* const to = x == shared ? x : added;
        for (long r = 0; x != shared && r < n; r++) std::fill(added + r * hidden + part.begin, added + r * hidden + part.end, 0.0f);
        each_taken<Some>([&](const GatedMLP& mlp, long begin, long count) {
            taken.n = count;
            for (long i = 0; i < count; i++) taken.prepare(i, gate_up + (begin + i) * 2 * I, I);
            Product<Some> product = taken.times(mlp.down);
            product.places = &routes.rows[begin];
            product.shares = &routes.shares[begin];
            product.onto(part, to, hidden);
        }, layer);
        member.meet();
        if (x != shared) take_added(layer.down_norm);
    }

    template <class Some, class Work>
    void each_taken(Work work, const Layer& layer) {
        for (long e = 0; e < m.num_experts; e++) {
            const long begin = routes.begins[e], count = routes.begins[e + 1] - begin;
            if (!count) continue;
            shape<Some>(count);
            work(layer.mlps[e], begin, count);
        }
    }

    // What an MLP's gate lets through, of some rows: a thread's part, in the first half of [count, 2 I].
    template <class Some>
    void gate(const Inputs<Some>& of, const GatedMLP& mlp, float* to) const {
        const Part part = part_of(mlp.gate, thread, threads);
        const long I = mlp.gate.out;
        of.times(mlp.gate).into(part, to, 2 * I);
        of.times(mlp.up).into(part, to + I, 2 * I);
        for (long r = 0; r < of.n; r++, to += 2 * I) {
            long i = part.begin;
            for (; i + WIDTH <= part.end; i += WIDTH) {
                const Floats v = gated(load(to + i), load(to + I + i), m);
                std::memcpy(to + i, &v, sizeof v);
            }
            for (; i < part.end; i++) to[i] = gated(to[i], to[I + i], m);
        }
    }

    // Adds the inputs' product to the residual stream, by its norm where there is one.
    void add(const Matrix& matrix, const float* norm) {
        const Part part = part_of(matrix, thread, threads);
        if (x == shared) inputs.times(matrix).onto(part, x, hidden);
        else inputs.times(matrix).into(part, added, hidden);
        member.meet();
        if (x != shared) take_added(norm);
    }

    void take_added(const float* norm) {
        for (long r = 0; r < n; r++) {
            const float* from = added + r * hidden;
            if (norm) inputs.norm(from, norm, hidden, m.epsilon, inputs.row);
            if (norm) from = inputs.row;
            for (long i = 0; i < hidden; i++) x[r * hidden + i] += from[i];
        }
    }
};

// Copies a token's keys and values to another slot, for each pair of slots (from, to).
template <class Number>
void move(const Model& m, const Step& s, const int64_t* slots, long count) {
    const long D = m.head_size;
    const auto key_at = [=](long slot) { return slot / WIDTH * WIDTH * D + slot % WIDTH; };
    for (long l = 0; l < m.num_layers; l++)
        for (long k = 0; k < m.num_key_heads; k++) {
            Number* const keys = (Number*)s.cache + (2 * l * m.num_key_heads + k) * s.num_slots * D;
            Number* const values = keys + m.num_key_heads * s.num_slots * D;
            for (long i = 0; i < count; i++) {
                const long from = slots[2 * i], to = slots[2 * i + 1];
                for (long j = 0; j < D; j++) keys[key_at(to) + j * WIDTH] = keys[key_at(from) + j * WIDTH];
                std::memcpy(values + to * D, values + from * D, D * sizeof(Number));
            }
        }
}

void run(const Model& m, const Step& s, Member& member) {
    Pass<WEIGHTS, NUMBER>(m, s, member).run();
}

// The first of the largest of scores [count]; -1 where that is no finite number.
int64_t likeliest(const float* scores, long count) {
    Floats most = Floats{} - INFINITY;
    Ints is_number = Ints{} - 1;
    long i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const Floats some = load(scores + i);
        most = some > most ? some : most;
        is_number &= some == some;
    }
    float largest = -INFINITY;
    bool are_numbers = true;
    for (long j = 0; j < WIDTH; j++) {
        largest = std::max(largest, most[j]);
        are_numbers &= is_number[j] != 0;
    }
    for (; i < count; i++) {
        largest = std::max(largest, scores[i]);
        are_numbers &= scores[i] == scores[i];
    }
    if (!are_numbers || std::isinf(largest)) return -1;
    return std::find(scores, scores + count, largest) - scores;
}

// How many of the best of weights [count] top-k, top-p and min-p leave, in this order; they are the first of `order`. It
// is what `sampling/chain.py` does for whole batches, and a test holds the two together.
// Equals stand in their numbers' order. Weights are those of e^(x - largest), so that the largest is 1.
long cut(const float* weights, long count, const Chance& chance, std::vector<int32_t>& order) {
    order.resize(count);
    std::iota(order.begin(), order.end(), 0);
    const auto before = [&](int32_t a, int32_t b) { return weights[a] != weights[b] ? weights[a] > weights[b] : a < b; };
    const auto first = order.begin();
    const long most = chance.top_k > 0 ? std::min(chance.top_k, int64_t(count)) : count;
    if (most < count) std::nth_element(first, first + most, order.end(), before);
    double total = 0, held = 0;
    for (long i = 0; i < most; i++) total += weights[order[i]];
    const double enough = chance.top_p < 1 ? chance.top_p * total : INFINITY;
    long kept = 0;
    for (long sorted = 0; kept < most; kept++) {
        if (kept == sorted) {  // few are left as a rule, so few are sorted at a time
            sorted = std::min(most, std::max(64l, 4 * sorted));
            std::partial_sort(first + kept, first + sorted, first + most, before);
        }
        const float weight = weights[order[kept]];
        if (kept && (held >= enough || weight < chance.min_p)) break;
        held += weight;
    }
    return kept;
}

// A token drawn from scores [count] by the inverse of its cumulative probabilities q [count], which are written; -1
// where the largest score is no finite number.
int64_t drawn(const float* scores, long count, const Chance& chance, double uniform, float* q) {
    const int64_t best = likeliest(scores, count);
    if (best < 0) return -1;
    const float largest = scores[best], temperature = float(chance.temperature);
    long i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const Floats x = (load(scores + i) - largest) / temperature;
        const Floats e = x < Floats{} - 87.0f ? Floats{} : exponential(x);  // below it a quotient may be 0
        std::memcpy(q + i, &e, sizeof e);
    }
    for (; i < count; i++) {
        const float x = (scores[i] - largest) / temperature;
        q[i] = x < -87.0f ? 0 : std::exp(x);
    }
    if (chance.top_k > 0 || chance.top_p < 1 || chance.min_p > 0) {
        std::vector<int32_t> order;
        for (long k = cut(q, count, chance, order); k < count; k++) q[order[k]] = 0;
    }
    double total = 0, until = 0;
    for (i = 0; i < count; i++) total += q[i];
    int64_t token = best;
    for (i = 0; i < count && until <= uniform * total; i++) {
        if (q[i] > 0) token = i;
        until += q[i];
    }
    for (i = 0; i < count; i++) q[i] = float(q[i] / total);
    return token;
}

}  // namespace

extern "C" {

int64_t scratch_floats(const Model* m, const Step* s) {
    const Room room(*m, *s);
    return room.shared + s->num_threads * room.own;
}

void move(const Model* m, const Step* s, const int64_t* slots, int64_t count) {
    move<NUMBER>(*m, *s, slots, count);
}

// Rows [count, in] of a matrix in blocks or in the numbers of the embedding.
void plain_rows(const Model* m, const Matrix* of, const int64_t* rows, int64_t count, float* to) {
    for (long i = 0; i < count; i++) plain_row(*m, *of, rows[i], 1.0f, to + i * of->in);
}

// Logits of final hidden states [num_wanted, hidden].
void head(const Model* m, const Step* s, const float* hidden) {
    together(*s, [=](const Member& member) {
        if constexpr (std::is_same_v<WEIGHTS, Blocks>)
            if (!m->head.panels) return head<PlainOf<NUMBER>>(*m, *s, hidden, member);
        head<WEIGHTS>(*m, *s, hidden, member);
    });
}

void forward(const Model* m, const Step* s) {
    together(*s, [=](Member& member) { run(*m, *s, member); });
}

// Continuations. Of each sequence the rows are what is unseen and then room for what follows; `counts` of its places are
// wanted, the first of them that of its last known token. `found` [num_wanted] are the tokens after these, of the first
// `num_tokens`: the likeliest where the sequence's temperature is 0, else drawn with `uniforms` [num_wanted] from `q`
// [num_wanted, num_tokens], which is written. Where one is not to be had it is -1, and nothing behind it is written.
void guess(const Model* m, const Step* s, const int64_t* counts, int64_t num_sequences, int64_t num_tokens,
           const Chance* chances, const double* uniforms, float* q, int64_t* found) {
    struct Going { long sequence, place, end; };  // the latter in `wanted`
    std::vector<Going> going;
    std::vector<Row> rows;
    std::vector<int64_t> wanted;
    for (long one = 0, place = 0, begin = 0; one < num_sequences; one++) {
        rows.insert(rows.end(), s->rows + begin, s->rows + s->wanted[place] + 1);
        wanted.push_back(long(rows.size()) - 1);
        going.push_back({one, place, place + counts[one]});
        place += counts[one];
        begin = s->wanted[place - 1] + 1;
    }
    Step step;
    const auto begin_forward = [&] {
        step = *s;
        step.rows = rows.data();
        step.wanted = wanted.data();
        step.num_rows = long(rows.size());
        step.num_wanted = long(wanted.size());
    };
    const auto take = [&] {
        rows.clear();
        wanted.clear();
        std::vector<Going> still;
        for (size_t i = 0; i < going.size(); i++) {
            auto [one, place, end] = going[i];
            const float* const scores = s->logits + long(i) * m->head.out;
            const int64_t token = found[place] = chances[one].temperature > 0
                ? drawn(scores, num_tokens, chances[one], uniforms[place], q + place * num_tokens)
                : likeliest(scores, num_tokens);
            if (token < 0 || ++place == end) continue;
            Row row = s->rows[s->wanted[place]];
            row.token = token;
            wanted.push_back(long(rows.size()));
            rows.push_back(row);
            still.push_back({one, place, end});
        }
        going.swap(still);
    };
    begin_forward();
    together(*s, [&](Member& member) {
        while (!going.empty()) {
            run(*m, step, member);
            member.meet();
            if (member.thread == 0) {
                take();
                begin_forward();
            }
            member.meeting.wait(member.thread, member.threads);  // not for a thread that was kept from running
        }
    });
}
}
