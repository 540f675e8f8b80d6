// The kernels for any processor the compiler targets (on x86-64: SSE2).
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels.hpp"

#define PHALANX_KERNELS_NAME "portable"
#define PHALANX_REGISTER 16
namespace phalanx::portable {
extern const Kernels table;
#include "kernels.inl"
}  // namespace phalanx::portable
