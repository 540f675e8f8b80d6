// The kernels for x86-64 with AVX2 and F16C (Haswell, Zen and later).
#if defined(__x86_64__)
#include <cstddef>
#include <cstdint>
#include <immintrin.h>
#include <type_traits>

#include "kernels.hpp"

// after the headers: their inline functions must run on every processor
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,prfchw"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,prfchw")
#endif

#define PHALANX_KERNELS_NAME "avx2"
#define PHALANX_REGISTER 32
namespace phalanx::avx2 {
extern const Kernels table;
#include "kernels.inl"
}  // namespace phalanx::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
