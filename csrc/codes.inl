// Source of the kernels for 8-bit codes, included by kernels.inl. Each block of numbers has one scale; the format is defined in
// src/phalanx/comm/block_code.py. Every operation rounds separately, as torch does without the core, so the bits are the same.

using Ints = Vector<std::int32_t>;

// Whole numbers from -127 to 127, as floats, to bytes and back. Compilers scalarize the general conversion.
#if PHALANX_REGISTER == 64
ALWAYS void store_bytes(void* to, Floats q) { store(to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)q))); }
ALWAYS Floats steps_at(const void* codes) {
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(codes)));
}
#elif PHALANX_REGISTER == 32
ALWAYS void store_bytes(void* to, Floats q) {
    const __m256i wide = _mm256_cvtps_epi32((__m256)q);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packs_epi16(half, half));
}
ALWAYS Floats steps_at(const void* codes) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(codes))));
}
#else
using Bytes = Vector<std::int8_t, PHALANX_REGISTER / 4>;
ALWAYS void store_bytes(void* to, Floats q) { store(to, __builtin_convertvector(__builtin_convertvector(q, Ints), Bytes)); }
ALWAYS Floats steps_at(const void* codes) {
    return __builtin_convertvector(__builtin_convertvector(load<Bytes>(codes), Ints), Floats);
}
#endif

constexpr float most_steps = 127;
constexpr float tiny = 7.888609052210118e-31f;  // 2^-100; the inverse of a smaller scale would overflow
constexpr std::int32_t infinity_bits = 0x7F800000;

ALWAYS Floats all_of(float value) {
    Floats v;
    for (int k = 0; k < lanes; ++k) v[k] = value;
    return v;
}

// Round to the nearest integer, ties to even, for magnitudes below 2^22: the sum has no bits left for fractions.
ALWAYS Floats nearest(Floats v) {
    const Floats magic = all_of(12582912.0f);
    return (v + magic) - magic;
}

// Floor, for magnitudes below 2^22.
ALWAYS Floats below(Floats v) {
    const Floats near = nearest(v);
    const Floats one = all_of(1.0f), zero = all_of(0.0f);
    return near - (near > v ? one : zero);
}

constexpr std::uint32_t stride = 0x9E3779B9u;  // between the seeds of neighbours; 2^32 over the golden ratio

// What the numbers from `at` on are hashed from. The seeds of the next vector are `lanes * stride` larger.
ALWAYS Bits seeds(std::uint32_t at, std::uint32_t key) {
    Bits h;
    for (int k = 0; k < lanes; ++k) h[k] = (at + static_cast<std::uint32_t>(k)) * stride + key;
    return h;
}

// Numbers from [0, 1) in steps of 2^-24, by a hash of their places and a key (Wellons, hash-prospector's lowbias32).
ALWAYS Floats chance(Bits h) {
    h = (h ^ (h >> 16)) * 0x21F0AAADu;
    h = (h ^ (h >> 15)) * 0xD35A2D97u;
    h = (h ^ (h >> 15)) >> 8;
    return __builtin_convertvector(load<Ints>(&h), Floats) * 5.9604644775390625e-8f;
}

struct Block {
    float scale, inverse;
    bool finite;
};

// The scale of a block, from its largest magnitude, given as the bits of a float.
ALWAYS Block block_of(std::int32_t largest) {
    float size;
    __builtin_memcpy(&size, &largest, sizeof size);
    if (largest >= infinity_bits) return {__builtin_nanf(""), 0, false};
    if (size < tiny) return {0, 0, true};
    return {size / most_steps, most_steps / size, true};
}

template <bool feedback>
ALWAYS Floats wanted(const float* x, const float* error) {
    return feedback ? load<Floats>(x) + load<Floats>(error) : load<Floats>(x);
}

template <bool stochastic>
ALWAYS Floats rounded(Floats steps, Bits seed) {
    if (!stochastic) return nearest(steps);
    const Floats most = all_of(most_steps), least = all_of(-most_steps);
    const Floats q = below(steps + chance(seed));
    return q > most ? most : q < least ? least : q;
}

// Encode one block of whole vectors: scale, codes and rounding error. A block that is not finite leaves the error unchanged.
template <bool feedback, bool stochastic>
ALWAYS float encode_block(const float* x, float* error, std::int8_t* out, std::size_t count, std::uint32_t key, std::uint32_t at) {
    Ints largest = {};
    for (std::size_t i = 0; i < count; i += lanes) {
        const Floats v = wanted<feedback>(x + i, error + i);
        const Ints size = load<Ints>(&v) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    std::int32_t most = 0;
    for (int k = 0; k < lanes; ++k) most = largest[k] > most ? largest[k] : most;
    const Block block = block_of(most);
    if (!block.finite) {
        __builtin_memset(out, 0, count);
        return block.scale;
    }
    const Floats inverse = all_of(block.inverse), scale = all_of(block.scale);
    Bits seed = seeds(at, key);
    for (std::size_t i = 0; i < count; i += lanes, seed += lanes * stride) {
        const Floats v = wanted<feedback>(x + i, error + i);
        const Floats q = rounded<stochastic>(v * inverse, seed);
        store_bytes(out + i, q);
        if (feedback) store(error + i, v - q * scale);
    }
    return block.scale;
}

constexpr std::size_t vector_tail = 64;  // elements; the longest remainder that is padded at a time

template <bool feedback, bool stochastic>
void encode_all(const float* x, float* error, char* out, std::size_t count, std::size_t block, std::uint32_t key, std::uint32_t at) {
    const std::size_t blocks = (count + block - 1) / block;
    std::int8_t* codes = reinterpret_cast<std::int8_t*>(out + 4 * blocks);
    for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t first = b * block, whole = count - first < block ? count - first : block;
        const std::uint32_t here = at + static_cast<std::uint32_t>(first);
        float* kept = feedback ? error + first : nullptr;
        float scale;
        if (whole % lanes == 0) {
            scale = encode_block<feedback, stochastic>(x + first, kept, codes + first, whole, key, here);
        } else {  // the last block of a buffer, on copies padded with zeros
            constexpr std::size_t longest = 65536 + vector_tail;
            static thread_local float px[longest], pe[longest];
            static thread_local std::int8_t pc[longest];
            const std::size_t padded = (whole + lanes - 1) / lanes * lanes;
            __builtin_memset(px, 0, padded * sizeof(float));
            __builtin_memset(pe, 0, padded * sizeof(float));
            __builtin_memcpy(px, x + first, whole * sizeof(float));
            if (feedback) __builtin_memcpy(pe, kept, whole * sizeof(float));
            scale = encode_block<feedback, stochastic>(px, pe, pc, padded, key, here);
            if (feedback) __builtin_memcpy(kept, pe, whole * sizeof(float));
            __builtin_memcpy(codes + first, pc, whole);
        }
        __builtin_memcpy(out + 4 * b, &scale, sizeof scale);
    }
}

void encode(const float* x, float* error, char* out, std::size_t count, const Coding& coding) {
    const auto each = error == nullptr ? (coding.stochastic ? encode_all<false, true> : encode_all<false, false>)
                                       : (coding.stochastic ? encode_all<true, true> : encode_all<true, false>);
    each(x, error, out, count, coding.block, coding.key, coding.at);
}

ALWAYS float scale_at(const char* code, std::size_t block) { return load<float>(code + 4 * block); }

// x += source[0] += source[1] ...: each number is read and written once, for any number of codes.
void add_codes(const char* const* source, int sources, float* x, std::size_t count, std::size_t block) {
    const std::size_t blocks = (count + block - 1) / block;
    for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t first = b * block, last = count - first < block ? count : first + block;
        std::size_t i = first;
        for (; i + lanes <= last; i += lanes) {
            Floats sum = load<Floats>(x + i);
            for (int s = 0; s < sources; ++s)
                sum = sum + steps_at(source[s] + 4 * blocks + i) * all_of(scale_at(source[s], b));
            store(x + i, sum);
        }
        for (; i < last; ++i)
            for (int s = 0; s < sources; ++s)
                x[i] = x[i] + static_cast<float>(static_cast<std::int8_t>(source[s][4 * blocks + i])) * scale_at(source[s], b);
    }
}

void decode(const char* code, float* x, std::size_t count, std::size_t block, float factor) {
    const std::size_t blocks = (count + block - 1) / block;
    const char* codes = code + 4 * blocks;
    for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t first = b * block, last = count - first < block ? count : first + block;
        const float scale = scale_at(code, b) * factor;
        const Floats each = all_of(scale);
        std::size_t i = first;
        for (; i + lanes <= last; i += lanes) store(x + i, steps_at(codes + i) * each);
        for (; i < last; ++i) x[i] = static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale;
    }
}
