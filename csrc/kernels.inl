// Source of all kernels. Each kernels_<name>.cpp includes it with its own instruction set and namespace, after all headers:
// nothing here may emit inline code that the linker could use for another file.
//
// Everything uses vectors of the compiler's vector extension, as wide as a register: PHALANX_REGISTER bytes.

template <class T, std::size_t bytes>
struct VectorOf {
    typedef T type __attribute__((vector_size(bytes)));
};
template <class T, std::size_t bytes = PHALANX_REGISTER>
using Vector = typename VectorOf<T, bytes>::type;

constexpr int lanes = PHALANX_REGISTER / 4;  // of float32
using Floats = Vector<float>;
using Bits = Vector<std::uint32_t>;
using Halves = Vector<std::uint16_t, PHALANX_REGISTER / 2>;

#define ALWAYS static inline __attribute__((always_inline))

template <class V>
ALWAYS V load(const void* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);  // alignment depends on the user's offset
    return v;
}

template <class V>
ALWAYS void store(void* to, V v) {
    __builtin_memcpy(to, &v, sizeof v);
}

// An element type: bytes of a vector in memory, the type to accumulate in, and the conversions.
template <class T>
struct Plain {
    using Sum = Vector<T>;
    static constexpr std::size_t bytes = PHALANX_REGISTER;
    ALWAYS Sum read(const void* from) { return load<Sum>(from); }
    ALWAYS void write(void* to, Sum v) { store(to, v); }
};

struct BFloat16 {
    using Sum = Floats;
    static constexpr std::size_t bytes = PHALANX_REGISTER / 2;
    ALWAYS Floats read(const void* from) {
        const Bits bits = __builtin_convertvector(load<Halves>(from), Bits) << 16;
        return load<Floats>(&bits);
    }
    ALWAYS void write(void* to, Floats v) {
        const Bits bits = load<Bits>(&v);
        const Bits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
        const Bits quiet_nan = (bits ^ bits) + 0x7FC0;
        store(to, __builtin_convertvector(v == v ? rounded : quiet_nan, Halves));
    }
};

#if PHALANX_REGISTER == 64
struct Float16 {
    using Sum = Floats;
    static constexpr std::size_t bytes = 32;
    ALWAYS Floats read(const void* from) { return (Floats)_mm512_cvtph_ps(load<__m256i>(from)); }
    ALWAYS void write(void* to, Floats v) { store(to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
};
#elif PHALANX_REGISTER == 32
struct Float16 {
    using Sum = Floats;
    static constexpr std::size_t bytes = 16;
    ALWAYS Floats read(const void* from) { return (Floats)_mm256_cvtph_ps(load<__m128i>(from)); }
    ALWAYS void write(void* to, Floats v) { store(to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT)); }
};
#else
ALWAYS float widened(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
    const std::uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3FF;
    std::uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000 | mantissa << 13 | (mantissa ? 0x400000 : 0);
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {  // zero, or a subnormal: mantissa * 2^-24, exact in float32
        const float tiny = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        bits = sign | load<std::uint32_t>(&tiny);
    }
    return load<float>(&bits);
}

ALWAYS std::uint16_t narrowed(float value) {
    const std::uint32_t bits = load<std::uint32_t>(&value);
    const std::uint32_t sign = (bits >> 16) & 0x8000;
    const std::uint32_t size = bits & 0x7FFFFFFF;
    std::uint32_t half;
    if (size > 0x7F800000) {
        half = 0x7E00;  // NaN
    } else if (size >= 0x47800000) {
        half = 0x7C00;  // 65536 and more
    } else if (size < 0x38800000) {  // below 2^-14: adding 0.5 leaves the subnormal's bits, rounded to even, at the bottom
        const float shifted = load<float>(&size) + 0.5f;
        half = load<std::uint32_t>(&shifted) - 0x3F000000;
    } else {
        const std::uint32_t rounded = size + 0xFFF + ((size >> 13) & 1);  // a carry into the exponent is correct, even to infinity
        half = (rounded - 0x38000000) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

struct Float16 {
    using Sum = Floats;
    static constexpr std::size_t bytes = PHALANX_REGISTER / 2;
    ALWAYS Floats read(const void* from) {
        std::uint16_t halves[lanes];
        float wide[lanes];
        __builtin_memcpy(halves, from, sizeof halves);
        for (int i = 0; i < lanes; ++i) wide[i] = widened(halves[i]);
        return load<Floats>(wide);
    }
    ALWAYS void write(void* to, Floats v) {
        float wide[lanes];
        std::uint16_t halves[lanes];
        store(wide, v);
        for (int i = 0; i < lanes; ++i) halves[i] = narrowed(wide[i]);
        __builtin_memcpy(to, halves, sizeof halves);
    }
};
#endif

struct Sum {
    template <class V>
    ALWAYS V of(V a, V b) {
        return a + b;
    }
};
struct Max {  // NaN wins, as in torch.maximum
    template <class V>
    ALWAYS V of(V a, V b) {
        return (a > b) | (a != a) ? a : b;
    }
};
struct Min {
    template <class V>
    ALWAYS V of(V a, V b) {
        return (a < b) | (a != a) ? a : b;
    }
};

ALWAYS Floats scaled(Floats v, double by) { return v * static_cast<float>(by); }
ALWAYS Vector<double> scaled(Vector<double> v, double by) { return v * by; }
template <class V>
ALWAYS V scaled(V v, double) {
    return v;  // integers are not scaled: the caller rejects that
}

// Four vectors at a time: enough independent work to hide the latency of an addition, few enough to stay in registers.
constexpr int group = 4;

template <class Element, class Operation>
void reduce(void* const* dst, int targets, const void* const* src, int sources, std::size_t bytes, double scale) {
    constexpr std::size_t step = group * Element::bytes;
    constexpr bool sums = std::is_same<Operation, Sum>::value;
    using V = typename Element::Sum;
    std::size_t at = 0;
    for (; at + step <= bytes; at += step) {
        V sum[group];
        for (int k = 0; k < group; ++k) sum[k] = Element::read(static_cast<const char*>(src[0]) + at + k * Element::bytes);
        for (int r = 1; r < sources; ++r) {
            const char* from = static_cast<const char*>(src[r]) + at;
            for (int k = 0; k < group; ++k) sum[k] = Operation::of(sum[k], Element::read(from + k * Element::bytes));
        }
        for (int k = 0; k < group; ++k) sum[k] = sums ? scaled(sum[k], scale) : sum[k];
        for (int r = 0; r < targets; ++r)
            for (int k = 0; k < group; ++k) Element::write(static_cast<char*>(dst[r]) + at + k * Element::bytes, sum[k]);
    }
    // the remainder: same arithmetic, on copies padded with zeros
    for (; at < bytes; at += Element::bytes) {
        const std::size_t rest = bytes - at < Element::bytes ? bytes - at : Element::bytes;
        alignas(64) char padded[Element::bytes] = {};
        __builtin_memcpy(padded, static_cast<const char*>(src[0]) + at, rest);
        V sum = Element::read(padded);
        for (int r = 1; r < sources; ++r) {
            __builtin_memcpy(padded, static_cast<const char*>(src[r]) + at, rest);
            sum = Operation::of(sum, Element::read(padded));
        }
        Element::write(padded, sums ? scaled(sum, scale) : sum);
        for (int r = 0; r < targets; ++r) __builtin_memcpy(static_cast<char*>(dst[r]) + at, padded, rest);
    }
}

template <class Element, class Operation, std::size_t width>
void reduce_elements(void* const* dst, int targets, const void* const* src, int sources, std::size_t count, double scale) {
    reduce<Element, Operation>(dst, targets, src, sources, count * width, scale);
}

#include "update.inl"
#include "adam.inl"
#include "codes.inl"
#include "low_rank.inl"

constexpr std::size_t copy_step = group * PHALANX_REGISTER;

ALWAYS void ask_for(char* to) {
    constexpr std::size_t lead = 1024;
    for (std::size_t k = 0; k < copy_step; k += 64) __builtin_prefetch(to + lead + k, 1);
}

void put(void* to, const void* from, std::size_t bytes) {
    char* target = static_cast<char*>(to);
    const char* source = static_cast<const char*>(from);
    for (; bytes >= copy_step; bytes -= copy_step, target += copy_step, source += copy_step) {
        ask_for(target);
        Bits v[group];
        for (int k = 0; k < group; ++k) v[k] = load<Bits>(source + k * PHALANX_REGISTER);
        for (int k = 0; k < group; ++k) store(target + k * PHALANX_REGISTER, v[k]);
    }
    __builtin_memcpy(target, source, bytes);
}

// All loads come before the stores: the four buffers often lie at the same offset of their pages, and a processor that compares
// only the low bits of addresses would delay a load behind an unrelated store.
void exchange(void* put_to, const void* put_from, void* take_to, const void* take_from, std::size_t bytes) {
    char *there = static_cast<char*>(put_to), *here = static_cast<char*>(take_to);
    const char *mine = static_cast<const char*>(put_from), *given = static_cast<const char*>(take_from);
    std::size_t at = 0;
    for (; at + copy_step <= bytes; at += copy_step) {
        ask_for(there + at);
        Bits in[group], out[group];
        for (int k = 0; k < group; ++k) in[k] = load<Bits>(mine + at + k * PHALANX_REGISTER);
        for (int k = 0; k < group; ++k) out[k] = load<Bits>(given + at + k * PHALANX_REGISTER);
        for (int k = 0; k < group; ++k) store(there + at + k * PHALANX_REGISTER, in[k]);
        for (int k = 0; k < group; ++k) store(here + at + k * PHALANX_REGISTER, out[k]);
    }
    __builtin_memcpy(there + at, mine + at, bytes - at);
    __builtin_memcpy(here + at, given + at, bytes - at);
}

#define ROW(Element, width) \
    {reduce_elements<Element, Sum, width>, reduce_elements<Element, Max, width>, reduce_elements<Element, Min, width>}

const Kernels table = {
    PHALANX_KERNELS_NAME,
    {
        ROW(Plain<float>, 4),
        ROW(Plain<double>, 8),
        ROW(Float16, 2),
        ROW(BFloat16, 2),
        ROW(Plain<std::int8_t>, 1),
        ROW(Plain<std::int16_t>, 2),
        ROW(Plain<std::int32_t>, 4),
        ROW(Plain<std::int64_t>, 8),
        ROW(Plain<std::uint8_t>, 1),
    },
    update,
    update_and_square,
    norms,
    adam,
    put,
    exchange,
    encode,
    add_codes,
    decode,
    advance,
    expand,
};

#undef ROW
#undef ALWAYS
