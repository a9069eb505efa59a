// AVX-VNNI's product of bytes in plain C++, so that its path runs where there is only AVX2.
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace emulated {

inline __m256i dpbusd(__m256i sums, __m256i a, __m256i b) {
    int32_t found[8];
    uint8_t bytes[32];
    int8_t signed_bytes[32];
    std::memcpy(found, &sums, 32);
    std::memcpy(bytes, &a, 32);
    std::memcpy(signed_bytes, &b, 32);
    for (int i = 0; i < 32; i++) found[i / 4] += int32_t(bytes[i]) * signed_bytes[i];
    std::memcpy(&sums, found, 32);
    return sums;
}

}  // namespace emulated

#define _mm256_dpbusd_avx_epi32(sums, a, b) emulated::dpbusd(sums, a, b)
#define __AVXVNNI__ 1
