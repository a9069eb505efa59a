// A toy model's forward as a program, which stands behind llama_step.cpp: of every row whatever rows are beside it the same
// bits, else it fails, and its logits to the standard output. A weight depends on its place alone, not on the processor.

#include <cstdio>
#include <deque>

namespace {

constexpr bool HAS_BLOCKS = std::is_same_v<WEIGHTS, Blocks>;  // in whole super-blocks; others leave packs and panels unfilled
constexpr long HEADS = 4, KEY_HEADS = 2, HEAD_SIZE = HAS_BLOCKS ? 64 : 22, HIDDEN = HAS_BLOCKS ? 256 : 87;
constexpr long MLP = HAS_BLOCKS ? 512 : 151, VOCABULARY = 97, LAYERS = 4, SLOTS = 64, LENGTHS[2] = {23, 8};
constexpr int TYPES[] = {0, 1, 30, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39};

uint32_t hashed(uint64_t place) {  // the upper half of SplitMix64
    uint64_t bits = (place + 1) * 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return uint32_t((bits ^ bits >> 31) >> 32);
}

float number(uint64_t place) { return float(int32_t(hashed(place))) * 0x1p-31f; }  // -1 … 1

template <class T>
T* zeros(long count) {
    static std::deque<std::vector<uint64_t>> all;
    return (T*)all.emplace_back(count * sizeof(T) / 8 + 16).data();
}

uint64_t num_drawn = 0;  // tensors

float* vector_of(long count, float middle, float range) {
    float* const values = zeros<float>((count + LEAST - 1) / LEAST * LEAST);
    const uint64_t first = num_drawn++ << 32;
    for (long i = 0; i < count; i++) values[i] = middle + range * number(first + i);
    return values;
}

void lay_blocks(Matrix& m) {
    const long num_blocks = blocks_for(m.in), num_panels = (m.out + WIDTH - 1) / WIDTH;
    const uint64_t first = num_drawn++ << 32;
    with_layout(TYPES[num_drawn % std::size(TYPES)], [&](auto layout) {
        using L = decltype(layout);
        std::vector<uint8_t> file(m.out * row_bytes<L>(m.in));
        for (size_t i = 0; i < file.size(); i++) file[i] = uint8_t(hashed(first + i));
        if constexpr (L::IS_PLAIN)  // of an ordinary size
            for (auto* bits = (typename L::Bits*)file.data(); bits != (void*)(file.data() + file.size()); bits++) {
                constexpr auto LEAST_BIT = L::EXPONENT & -L::EXPONENT, ORDINARY = (L::EXPONENT >> 1 & L::EXPONENT) - 6 * LEAST_BIT;
                *bits = typename L::Bits((*bits & ~L::EXPONENT) | ORDINARY);
            }
        auto* const weight = zeros<uint8_t>(num_panels * panel_bytes<L>(num_blocks));
        auto* const panels = zeros<int64_t>(2 * num_panels);
        for (long p = 0; p < num_panels; p++) {
            panels[2 * p] = p * panel_bytes<L>(num_blocks);
            panels[2 * p + 1] = L::ID;
            int64_t order[WIDTH];
            std::iota(order, order + WIDTH, p * WIDTH);
            const long count = std::min(WIDTH, long(m.out) - p * WIDTH);
            fill_panel<L>(file.data(), order, count, m.in, weight + panels[2 * p]);
            if constexpr (!L::IS_PLAIN) for (long unit = 0; unit < num_blocks / L::UNIT_BLOCKS; unit++)  // scales and minimums of an ordinary size
                for (long i = 0; i < count * (1 + L::HAS_MINIMUM); i++) {
                    const uint64_t place = ((p * WIDTH + i % count) * 2 + i / count) * num_blocks + unit;
                    const uint32_t some = hashed(first + (1u << 31) + place);
                    const uint16_t ordinary = uint16_t((L::IS_BFLOAT16 ? 0x3b80 : L::IS_SUPER ? 0x0800 : 0x1800) + some % 0x200);
                    uint8_t* const head = weight + panels[2 * p] + unit * L::UNIT_BYTES + L::bits_at(i / count);
                    std::memcpy(head + 2 * (i % count), &ordinary, 2);
                }
        }
        m.weight = weight;
        m.panels = panels;
    });
}

template <class Kind>
void lay(Matrix& m) {
    using Weight = typename Kind::Weight;
    const long padded = (m.in + Kind::PACK - 1) / Kind::PACK * Kind::PACK, panels = (m.out + LEAST - 1) / LEAST * LEAST;
    auto* const weight = zeros<Weight>(padded * panels);
    auto *const scales = zeros<float>(panels);
    auto *const sums = zeros<int32_t>(panels);
    const uint64_t first = num_drawn++ << 32;
    const float range = 1.0f / std::sqrt(float(m.in));
    for (long o = 0; o < m.out; o++) {
        const Panel panel(m, o);
        scales[o] = (1.5f + number(first + (1u << 31) + o)) * range / (127 * 127);
        for (long i = 0; i < m.in; i++) {
            Weight& to = weight[panel.begin * padded + (i / Kind::PACK * panel.width + o - panel.begin) * Kind::PACK + i % Kind::PACK];
            const float value = number(first + o * m.in + i);
            if constexpr (std::is_same_v<Kind, Int8>) sums[o] += to = Weight(value * 127);
            else put(&to, value * range);
        }
    }
    m.weight = weight;
    m.scales = scales;
    m.sums = sums;
}

template <class Kind>
Matrix matrix(long out, long in, long unit = 1, bool has_bias = false) {
    const long grain = std::lcm(LEAST, unit);
    Matrix m{};
    m.out = out;
    m.in = in;
    m.half = out / 2 / grain * grain;
    m.by = 1.0f;
    if (has_bias) m.bias = vector_of(out, 0.0f, 0.5f);
    if constexpr (std::is_same_v<Kind, Blocks>) lay_blocks(m);
    else lay<Kind>(m);
    return m;
}

Model model() {
    using Embedding = std::conditional_t<HAS_BLOCKS, Blocks, PlainOf<NUMBER>>;
    auto* const layers = zeros<Layer>(LAYERS);
    for (long l = 0; l < LAYERS; l++) {
        layers[l].input_norm = vector_of(HIDDEN, 1.0f, 0.5f);
        layers[l].qkv = matrix<WEIGHTS>((HEADS + 2 * KEY_HEADS) * HEAD_SIZE, HIDDEN, HEAD_SIZE, true);
        layers[l].head_norm = vector_of((HEADS + KEY_HEADS) * HEAD_SIZE, 1.0f, 0.5f);
        layers[l].output = matrix<WEIGHTS>(HIDDEN, HEADS * HEAD_SIZE);
        layers[l].output_norm = vector_of(HIDDEN, 1.0f, 0.5f);
        layers[l].mlp_norm = vector_of(HIDDEN, 1.0f, 0.5f);
        auto* const mlp = zeros<GatedMLP>(1);
        mlp->gate = matrix<WEIGHTS>(MLP, HIDDEN);
        mlp->up = matrix<WEIGHTS>(MLP, HIDDEN);
        mlp->down = matrix<WEIGHTS>(HIDDEN, MLP);
        layers[l].mlps = mlp;
        layers[l].down_norm = vector_of(HIDDEN, 1.0f, 0.5f);
        layers[l].window = l % 2 ? 7 : 0;
        layers[l].scale = 0.3f;
    }
    Model m{};
    m.layers = layers;
    m.embedding = matrix<Embedding>(VOCABULARY, HIDDEN);
    m.norm = vector_of(HIDDEN, 1.0f, 0.5f);
    m.head = matrix<WEIGHTS>(VOCABULARY, HIDDEN);
    m.num_layers = LAYERS;
    m.hidden = HIDDEN;
    m.num_heads = HEADS;
    m.num_key_heads = KEY_HEADS;
    m.head_size = m.num_turned = HEAD_SIZE;
    m.mlp = MLP;
    m.num_taken = 1;
    m.activation = 1;
    m.norms_outputs = 1;
    m.epsilon = 1e-5f;
    m.embedding_scale = 10.0f;
    m.score_cap = 20.0f;
    m.logit_cap = 30.0f;
    return m;
}

// Rows of two sequences, `together` of one after another in a step: logits [rows, V].
std::vector<float> logits(const Model& m, long together) {
    const std::vector<float> turns = [] {
        std::vector<float> all;
        for (long position = 0; position < LENGTHS[0]; position++)
            for (long j = 0; j < HEAD_SIZE / 2; j++) {
                const double angle = double(position) / double(j + 1);
                all.push_back(float(std::cos(angle)));
                all.push_back(float(std::sin(angle)));
            }
        return all;
    }();
    std::vector<Row> rows;
    for (long sequence = 0; sequence < 2; sequence++)
        for (long position = 0; position < LENGTHS[sequence]; position++) {
            Row row{};
            row.token = hashed(uint64_t(sequence << 8 | position)) % VOCABULARY;
            row.position = position;
            row.first_slot = sequence * SLOTS / 2 + 3;
            row.slot = row.first_slot + position;
            rows.push_back(row);
        }
    const long n = long(rows.size());
    std::vector<float> found(n * VOCABULARY);
    std::vector<NUMBER> cache(LAYERS * 2 * KEY_HEADS * SLOTS * HEAD_SIZE + 4096);
    for (long begin = 0; begin < n; begin += together) {
        Step s{};
        s.num_rows = s.num_wanted = std::min(together, n - begin);
        std::vector<int64_t> wanted(s.num_rows);
        std::iota(wanted.begin(), wanted.end(), 0);
        const float* const tables[1] = {turns.data()};
        double waited = 0;
        s.rows = &rows[begin];
        s.wanted = wanted.data();
        s.num_slots = s.block = SLOTS;
        s.most_keys = LENGTHS[0];
        s.num_threads = 2;
        s.cache = cache.data();
        s.turns = tables;
        s.waited = &waited;
        s.logits = &found[begin * VOCABULARY];
        std::vector<float> scratch(scratch_floats(&m, &s) + 64);
        s.scratch = scratch.data();
        forward(&m, &s);
    }
    return found;
}

}  // namespace

int main() {
    const Model m = model();
    const std::vector<float> whole = logits(m, 100);
    for (const long together : {1, 2, 3, 4, 5, 7, 8, 11})
        if (std::memcmp(logits(m, together).data(), whole.data(), whole.size() * sizeof(float))) {
            std::fprintf(stderr, "rows have other bits in steps of %ld\n", together);
            return 1;
        }
    std::fwrite(whole.data(), sizeof(float), whole.size(), stdout);
}
