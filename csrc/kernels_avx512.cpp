// The kernels for x86-64 with AVX-512 (F, BW, DQ, VL: Skylake-SP, Zen 4 and later).
#if defined(__x86_64__)
#include <cstddef>
#include <cstdint>
#include <immintrin.h>
#include <type_traits>

#include "kernels.hpp"

// after the headers: their inline functions must run on every processor
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prfchw")
#endif

#define PHALANX_KERNELS_NAME "avx512"
#define PHALANX_REGISTER 64
namespace phalanx::avx512 {
extern const Kernels table;
#include "kernels.inl"
}  // namespace phalanx::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
