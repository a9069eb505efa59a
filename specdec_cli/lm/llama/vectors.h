// Vectors of a processor's own width, and what is done with them in the same way on every processor.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <mutex>
#include <numeric>
#include <omp.h>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// What a processor's registers hold: the sums of a product, queries that meet keys together (more where these have to be
// widened first), those whose means are taken together, and a mean's vectors. With few registers a product goes through
// its weights in narrow panels, several side by side where there are few rows.
#if defined(__AVX512F__)
constexpr long WIDTH = 16, PANEL = 64;
constexpr int REGISTERS = 32, SUMS = 24, QUERIES = 3, QUERIES_OF_HALVES = 5, WEIGHED = 3, MEANS = 4;
#elif defined(__aarch64__)
constexpr long WIDTH = 4, PANEL = 16;
constexpr int REGISTERS = 32, SUMS = 24, QUERIES = 3, QUERIES_OF_HALVES = 5, WEIGHED = 3, MEANS = 4;
#else
constexpr long WIDTH = 8, PANEL = 16;
constexpr int REGISTERS = 16, SUMS = 12, QUERIES = 2, QUERIES_OF_HALVES = 2, WEIGHED = 2, MEANS = 2;
#endif
typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
constexpr int ROWS = 6;     // that are multiplied together at most, with
constexpr long TILE = 64;   // outputs, and
constexpr long LEAST = 16;  // at a matrix' end
constexpr long AHEAD = 8192;  // bytes that are fetched early: busy with several rows, a processor reads too little ahead
constexpr long VALUES_AHEAD = 4096;  // likewise, of a head's values; of its keys the next panels are
#if (defined(__znver3__) && defined(__AVX512F__) || defined(__znver4__)) && !defined(__AVX512VP2INTERSECT__)
constexpr bool FETCHES = false;  // but Zen 4, whom it costs a tenth of its time. Older compilers take it and Zen 5 for Zen 3
#else
constexpr bool FETCHES = true;
#endif

inline Floats load(const float* from) { return *(const Floats*)from; }

// Four products of bytes in each lane, the first without a sign and the second with one, in one instruction.
#if defined(__AVX512VNNI__)
#define HAS_BYTE_PRODUCTS 1
inline Ints add_products(Ints sums, Ints bytes, Ints signed_bytes) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, (__m512i)signed_bytes);
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define HAS_BYTE_PRODUCTS 1
inline Ints add_products(Ints sums, Ints bytes, Ints signed_bytes) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)bytes, (__m256i)signed_bytes);
}
#else
#define HAS_BYTE_PRODUCTS 0
#endif

// The sums over each of N vectors, always in the same order.
template <class Vector, class Number, int N>
inline void sum_each(const Vector (&of)[N], Number (&found)[N]) {
    for (int n = 0; n < N; n++) {
        Number halves[WIDTH];
        std::memcpy(halves, &of[n], sizeof halves);
        for (long half = WIDTH / 2; half; half /= 2)
            for (long i = 0; i < half; i++) halves[i] += halves[i + half];
        found[n] = halves[0];
    }
}

#if defined(__AVX512F__)
inline __m128 quarter_of(Floats v) {
    const __m512d whole = (__m512d)v;
    const __m256 half = _mm256_add_ps((__m256)_mm512_castpd512_pd256(whole), (__m256)_mm512_extractf64x4_pd(whole, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline void sum_each(const Floats (&of)[4], float (&found)[4]) {
    const __m128 first = _mm_hadd_ps(quarter_of(of[0]), quarter_of(of[1]));
    _mm_storeu_ps(found, _mm_hadd_ps(first, _mm_hadd_ps(quarter_of(of[2]), quarter_of(of[3]))));
}

inline void sum_each(const Floats (&of)[1], float (&found)[1]) {
    const __m128 quarter = quarter_of(of[0]), pairs = _mm_hadd_ps(quarter, quarter);
    found[0] = _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
}
#endif

inline Floats spread(float value) {  // to all of a vector
#if defined(__AVX512F__)
    return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX2__)
    return (Floats)_mm256_set1_ps(value);
#elif defined(__aarch64__)
    return (Floats)vdupq_n_f32(value);
#else
    Floats found;
    for (long i = 0; i < WIDTH; i++) found[i] = value;
    return found;
#endif
}

inline Ints spread_bits(const void* from) {  // 32 of them
    int32_t bits;
    std::memcpy(&bits, from, sizeof bits);
#if defined(__AVX512F__)
    return (Ints)_mm512_set1_epi32(bits);
#elif defined(__AVX2__)
    return (Ints)_mm256_set1_epi32(bits);
#else
    return Ints{} + bits;
#endif
}

template <class Vector>
inline Vector kept(Vector v) {  // in a register: compilers read it anew for each of its uses
#if defined(__AVX2__)
    if constexpr (sizeof v == sizeof(Floats)) asm("" : "+v"(v));
#endif
    return v;
}

inline float sum_of(Floats v) {
    const Floats of[1] = {v};
    float found[1];
    sum_each(of, found);
    return found[0];
}

// w x + sums, rounded once where the machine can; the compiler itself may not join operations (-ffp-contract=off), for
// it might in one copy of a loop and not in another, and rows would depend on their company.
inline Floats multiply_add(Floats w, Floats x, Floats sums) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)w, (__m512)x, (__m512)sums);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)w, (__m256)x, (__m256)sums);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)sums, (float32x4_t)w, (float32x4_t)x);
#elif defined(__FP_FAST_FMAF)
    for (long i = 0; i < WIDTH; i++) sums[i] = __builtin_fmaf(w[i], x[i], sums[i]);
    return sums;
#else
    return sums + w * x;
#endif
}

inline float float_of(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float found;
    std::memcpy(&found, &wide, 4);
    return found;
}

inline uint16_t bf16_of(float value) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Floats floats_of(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#elif defined(__aarch64__)
    return (Floats)vshll_n_u16(vld1_u16(from), 16);
#else
    Floats found;
    for (long i = 0; i < WIDTH; i++) found[i] = float_of(from[i]);
    return found;
#endif
}

inline Floats floats_of(const float* from) { return load(from); }
inline float float_of(float value) { return value; }
inline void put(float* to, float value) { *to = value; }
inline void put(uint16_t* to, float value) { *to = bf16_of(value); }

// e^x, to about one unit in the last place: 2^n times a polynomial of what is left (Cephes' expf). What is added and taken
// off again leaves a whole number, whose bits are the last ones of the sum: these go to the exponent.
inline Floats exponential(Floats x) {
    const Floats low = Floats{} - 87.3f, high = Floats{} + 88.3f, whole = Floats{} + 12582912.0f;  // 1.5 * 2^23
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Floats sum = multiply_add(x, Floats{} + 1.44269504088896341f, whole), n = sum - whole;
    x = multiply_add(n, Floats{} - 0.693359375f, x);
    x = multiply_add(n, Floats{} + 2.12194440e-4f, x);
    Floats y = Floats{} + 1.9875691500e-4f;
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = multiply_add(y, x, Floats{} + c);
    y = multiply_add(y, x * x, x) + 1.0f;
    return (Floats)((Ints)y + ((Ints)sum << 23));
}

}  // namespace
