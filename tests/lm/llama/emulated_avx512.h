// The AVX-512 operations that the decoder uses, in plain C++, so that its AVX-512 paths run where there is only AVX2.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <type_traits>
#include <vector>

namespace emulated {

typedef float F32 __attribute__((vector_size(64), may_alias));
typedef int32_t I32 __attribute__((vector_size(64), may_alias));
typedef uint32_t U32 __attribute__((vector_size(64), may_alias));
typedef int16_t I16 __attribute__((vector_size(64), may_alias));
typedef uint16_t U16 __attribute__((vector_size(64), may_alias));
typedef int8_t I8 __attribute__((vector_size(64), may_alias));
typedef uint8_t U8 __attribute__((vector_size(64), may_alias));

template <class To, class From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class To>
inline To read(const void* from) {
    To to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

template <class Made>
inline __m512 floats(Made made) {
    F32 found;
    for (int i = 0; i < 16; i++) found[i] = made(i);
    return as<__m512>(found);
}

template <class Made>
inline __m512i integers(Made made) {
    I32 found;
    for (int i = 0; i < 16; i++) found[i] = made(i);
    return as<__m512i>(found);
}

inline float of(__m512 v, int i) { return as<F32>(v)[i]; }

inline float bf16(uint16_t bits) { return as<float>(uint32_t(bits) << 16); }

inline __m512 dpbf16(__m512 sums, U16 a, U16 b) {
    return floats([&](int i) {
        const float odd = std::fma(bf16(a[2 * i + 1]), bf16(b[2 * i + 1]), of(sums, i));
        return std::fma(bf16(a[2 * i]), bf16(b[2 * i]), odd);
    });
}

inline __m512i dpbusd(__m512i sums, U8 a, I8 b) {
    return integers([&](int i) {
        int32_t sum = as<I32>(sums)[i];
        for (int j = 4 * i; j < 4 * i + 4; j++) sum += int32_t(a[j]) * int32_t(b[j]);
        return sum;
    });
}

inline __m512i madd(I16 a, I16 b) {
    return integers([&](int i) {
        return int32_t(a[2 * i]) * int32_t(b[2 * i]) + int32_t(a[2 * i + 1]) * int32_t(b[2 * i + 1]);
    });
}

inline __m512i widened(__m256i from) {
    uint16_t values[16];
    std::memcpy(values, &from, sizeof values);
    return integers([&](int i) { return int32_t(values[i]); });
}

template <class Numbers, class From>
inline __m512i each_of(From from) {
    typename std::remove_reference<decltype(Numbers()[0])>::type values[16];
    std::memcpy(values, &from, sizeof values);
    return integers([&](int i) { return int32_t(values[i]); });
}

inline __m512 of_halves(__m256i from) {
    const __m256 halves[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(from)), _mm256_cvtph_ps(_mm256_extracti128_si256(from, 1))};
    return read<__m512>(halves);
}

inline __m512i maddubs(U8 a, I8 b) {
    I16 found;
    for (int i = 0; i < 32; i++) {
        const int sum = int(a[2 * i]) * b[2 * i] + int(a[2 * i + 1]) * b[2 * i + 1];
        found[i] = int16_t(std::clamp(sum, -32768, 32767));
    }
    return as<__m512i>(found);
}

inline __m512i shuffled(U8 table, U8 places) {
    U8 found;
    for (int i = 0; i < 64; i++) found[i] = places[i] & 128 ? 0 : table[i / 16 * 16 + places[i] % 16];
    return as<__m512i>(found);
}

inline __m512i repeated(__m128i quarter) {
    const __m128i whole[4] = {quarter, quarter, quarter, quarter};
    return read<__m512i>(whole);
}

inline __m256d half(__m512d whole, int which) {
    __m256d halves[2];
    std::memcpy(halves, &whole, sizeof halves);
    return halves[which];
}

inline void write(void* to, __m512 v) { std::memcpy(to, &v, sizeof v); }

}  // namespace emulated

#define _mm512_set1_ps(v) emulated::floats([&](int) { return v; })
#define _mm512_set1_epi32(v) emulated::integers([&](int) { return v; })
#define _mm512_loadu_ps(from) emulated::read<__m512>(from)
#define _mm512_loadu_si512(from) emulated::read<__m512i>(from)
#define _mm512_storeu_ps(to, v) emulated::write(to, v)
#define _mm512_add_ps(a, b) emulated::as<__m512>(emulated::as<emulated::F32>(a) + emulated::as<emulated::F32>(b))
#define _mm512_mul_ps(a, b) emulated::as<__m512>(emulated::as<emulated::F32>(a) * emulated::as<emulated::F32>(b))
#define _mm512_fmadd_ps(a, b, c) \
    emulated::floats([&](int i) { return std::fma(emulated::of(a, i), emulated::of(b, i), emulated::of(c, i)); })
#define _mm512_mask_sub_ps(other, mask, a, b) \
    emulated::floats([&](int i) { \
        return (mask) >> i & 1 ? emulated::of(a, i) - emulated::of(b, i) : emulated::of(other, i); \
    })
#define _mm512_moveldup_ps(v) emulated::floats([&](int i) { return emulated::of(v, i & ~1); })
#define _mm512_movehdup_ps(v) emulated::floats([&](int i) { return emulated::of(v, i | 1); })
#define _mm512_permute_ps(v, order) \
    emulated::floats([&](int i) { return emulated::of(v, (i & ~3) + ((order) >> 2 * (i & 3) & 3)); })
#define _mm512_slli_epi32(v, n) emulated::as<__m512i>(emulated::as<emulated::U32>(v) << n)
#define _mm512_cvtepu16_epi32(v) emulated::widened(v)
#define _mm512_cvtepi8_epi32(v) emulated::each_of<emulated::I8>(v)
#define _mm512_cvtepi32_ps(v) emulated::floats([&](int i) { return float(emulated::as<emulated::I32>(v)[i]); })
#define _mm512_cvtph_ps(v) emulated::of_halves(v)
#define _mm512_maddubs_epi16(a, b) emulated::maddubs(emulated::as<emulated::U8>(a), emulated::as<emulated::I8>(b))
#define _mm512_add_epi16(a, b) emulated::as<__m512i>(emulated::as<emulated::U16>(a) + emulated::as<emulated::U16>(b))
#define _mm512_set1_epi16(v) _mm512_set1_epi32((v) * 65537)
#define _mm512_shuffle_epi8(a, b) emulated::shuffled(emulated::as<emulated::U8>(a), emulated::as<emulated::U8>(b))
#define _mm512_broadcast_i32x4(v) emulated::repeated(v)
#define _mm512_castpd512_pd256(v) emulated::half(v, 0)
#define _mm512_extractf64x4_pd(v, which) emulated::half(v, which)
#define _mm512_dpbf16_ps(sums, a, b) \
    emulated::dpbf16(sums, emulated::as<emulated::U16>(a), emulated::as<emulated::U16>(b))
#define _mm512_dpbusd_epi32(sums, a, b) \
    emulated::dpbusd(sums, emulated::as<emulated::U8>(a), emulated::as<emulated::I8>(b))
#define _mm512_madd_epi16(a, b) emulated::madd(emulated::as<emulated::I16>(a), emulated::as<emulated::I16>(b))

#define asm(...) (void)0  // what only keeps numbers in registers, which are too small here
#define __AVX512F__ 1
