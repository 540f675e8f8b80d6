// Choose the kernels for this processor.
#include "kernels.hpp"

#include <atomic>
#include <cstring>

namespace phalanx {
namespace portable {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

const Kernels* find(const char* name) {
    const auto wanted = [name](const char* candidate) { return name == nullptr || std::strcmp(name, candidate) == 0; };
#if defined(__x86_64__)
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && wanted("avx512")) return &avx512::table;
    if (has_avx2 && wanted("avx2")) return &avx2::table;
#endif
    return wanted("portable") ? &portable::table : nullptr;
}

std::atomic<const Kernels*>& chosen() {
    static std::atomic<const Kernels*> table{find(nullptr)};
    return table;
}

}  // namespace

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool choose_kernels(const char* name) {
    const Kernels* table = find(name);
    if (table != nullptr) chosen().store(table, std::memory_order_relaxed);
    return table != nullptr;
}

}  // namespace phalanx
