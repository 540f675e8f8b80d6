// Source of the update kernels, included by kernels.inl: they sum gradients, for their squares or to update parameters.

ALWAYS Floats summed(const float* const* gradients, int sources, std::size_t at) {
    Floats g = load<Floats>(gradients[0] + at);
    for (int r = 1; r < sources; ++r) g += load<Floats>(gradients[r] + at);
    return g;
}

// The last few elements: the sum of the gradients, padded with zeros.
ALWAYS void sum_rest(float* sum, const float* const* gradients, int sources, std::size_t at, std::size_t rest) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(lanes); ++i) {
        sum[i] = i < rest ? gradients[0][at + i] : 0;
        for (int r = 1; r < sources && i < rest; ++r) sum[i] += gradients[r][at + i];
    }
}

// Sixteen elements at a time, alternating between the halves of a run, with prefetching: one core gets more memory bandwidth this
// way than if the processor detects the streams itself (25.6 M parameters, updated and squared: 21 ms, not 26).
constexpr std::size_t sixteen = 16, ahead = 128;  // elements; 512 bytes were better than 1, 2 and 4 KiB
constexpr int registers = 16 / lanes;             // that hold sixteen floats

// Where the second half begins; it includes the remainder.
ALWAYS std::size_t half_of(std::size_t count) { return count / 2 / sixteen * sixteen; }

ALWAYS void ask_for_gradients(const float* const* gradients, int sources, std::size_t at) {
    for (int r = 0; r < sources; ++r) __builtin_prefetch(gradients[r] + at + ahead);
}

// gcc 12 would spill to memory
using Doubles = Vector<double>;
#if PHALANX_REGISTER == 64
ALWAYS Doubles lower(Floats v) { return (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)); }
ALWAYS Doubles upper(Floats v) { return (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1)); }
#elif PHALANX_REGISTER == 32
ALWAYS Doubles lower(Floats v) { return (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)); }
ALWAYS Doubles upper(Floats v) { return (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)); }
#else
ALWAYS Doubles lower(Floats v) { return Doubles{v[0], v[1]}; }
ALWAYS Doubles upper(Floats v) { return Doubles{v[2], v[3]}; }
#endif

// The squares of one half of a run, summed in double, where the product of two floats is exact. Element i goes to the i % 16-th of
// sixteen sums for any register width, so that every processor and every kernel that sums the same run gets the same bits.
struct Squared {
    Doubles sums[2 * registers] = {};

    __attribute__((always_inline)) void add(int k, Floats v) {
        const Doubles low = lower(v), high = upper(v);
        sums[2 * k] += low * low;
        sums[2 * k + 1] += high * high;
    }
    double total() const {
        double parts[16], sum = 0;
        __builtin_memcpy(parts, sums, sizeof parts);
        for (double part : parts) sum += part;
        return sum;
    }
};

template <bool with_w>
ALWAYS void square_sixteen(
    const float* w, const float* const* gradients, int sources, std::size_t at, float scale, Squared& ww, Squared& gg) {
    if (with_w) __builtin_prefetch(w + at + ahead);
    ask_for_gradients(gradients, sources, at);
    for (int k = 0; k < registers; ++k, at += lanes) {
        if (with_w) ww.add(k, load<Floats>(w + at));
        gg.add(k, summed(gradients, sources, at) * scale);
    }
}

template <bool with_w>
Squares norms_of(const float* w, const float* const* gradients, int sources, std::size_t count, float scale) {
    const std::size_t half = half_of(count);
    Squared ww[2], gg[2];
    std::size_t at = 0;
    for (; at < half; at += sixteen) {
        square_sixteen<with_w>(w, gradients, sources, at, scale, ww[0], gg[0]);
        square_sixteen<with_w>(w, gradients, sources, half + at, scale, ww[1], gg[1]);
    }
    for (at = 2 * half; at + sixteen <= count; at += sixteen)
        square_sixteen<with_w>(w, gradients, sources, at, scale, ww[1], gg[1]);
    for (int k = 0; at < count; ++k, at += lanes) {
        const std::size_t rest = count - at < lanes ? count - at : lanes;
        float padded_w[lanes] = {}, sum[lanes];
        sum_rest(sum, gradients, sources, at, rest);
        gg[1].add(k, load<Floats>(sum) * scale);
        if (!with_w) continue;
        __builtin_memcpy(padded_w, w + at, rest * sizeof(float));
        ww[1].add(k, load<Floats>(padded_w));
    }
    return {ww[0].total() + ww[1].total(), gg[0].total() + gg[1].total()};
}

Squares norms(const float* w, const float* const* gradients, int sources, std::size_t count, double scale) {
    const auto norms = w != nullptr ? norms_of<true> : norms_of<false>;
    return norms(w, gradients, sources, count, static_cast<float>(scale));
}

ALWAYS void step(Floats& w, Floats& v, Floats g, const Rule& rule) {
    const Floats u = (g * rule.scale + rule.weight_decay * w) * rule.step;
    v = rule.momentum * v + u;
    w -= rule.rate * (rule.nesterov ? u + rule.momentum * v : v);
}

template <bool squares>
ALWAYS void move_sixteen(float* w, float* velocity, const float* const* gradients, int sources, std::size_t at, const Rule& rule,
                         Squared& before, Squared& after) {
    __builtin_prefetch(w + at + ahead, 1);
    __builtin_prefetch(velocity + at + ahead, 1);
    ask_for_gradients(gradients, sources, at);
    for (int k = 0; k < registers; ++k, at += lanes) {
        Floats weight = load<Floats>(w + at), v = load<Floats>(velocity + at);
        if (squares) before.add(k, weight);
        step(weight, v, summed(gradients, sources, at), rule);
        if (squares) after.add(k, weight);
        store(velocity + at, v);
        store(w + at, weight);
    }
}

// The last few elements, same arithmetic, on copies padded with zeros.
template <bool squares>
void move_rest(float* w, float* velocity, const float* const* gradients, int sources, std::size_t at, std::size_t count,
               const Rule& rule, Squared& before, Squared& after) {
    for (int k = 0; at < count; ++k, at += lanes) {
        const std::size_t rest = count - at < lanes ? count - at : lanes, bytes = rest * sizeof(float);
        float sum[lanes], padded_w[lanes] = {}, padded_v[lanes] = {};
        sum_rest(sum, gradients, sources, at, rest);
        __builtin_memcpy(padded_w, w + at, bytes);
        __builtin_memcpy(padded_v, velocity + at, bytes);
        Floats weight = load<Floats>(padded_w), v = load<Floats>(padded_v);
        if (squares) before.add(k, weight);
        step(weight, v, load<Floats>(sum), rule);
        if (squares) after.add(k, weight);
        store(padded_w, weight);
        store(padded_v, v);
        __builtin_memcpy(w + at, padded_w, bytes);
        __builtin_memcpy(velocity + at, padded_v, bytes);
    }
}

template <bool squares>
Moved move(float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& given) {
    const Rule rule = given;  // a copy, so that no store to w can change it
    const std::size_t half = half_of(count);
    Squared before[2], after[2];
    std::size_t at = 0;
    for (; at < half; at += sixteen) {
        move_sixteen<squares>(w, velocity, gradients, sources, at, rule, before[0], after[0]);
        move_sixteen<squares>(w, velocity, gradients, sources, half + at, rule, before[1], after[1]);
    }
    for (at = 2 * half; at + sixteen <= count; at += sixteen)
        move_sixteen<squares>(w, velocity, gradients, sources, at, rule, before[1], after[1]);
    move_rest<squares>(w, velocity, gradients, sources, at, count, rule, before[1], after[1]);
    return {before[0].total() + before[1].total(), after[0].total() + after[1].total()};
}

void update(float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& rule) {
    move<false>(w, velocity, gradients, sources, count, rule);
}

Moved update_and_square(
    float* w, float* velocity, const float* const* gradients, int sources, std::size_t count, const Rule& rule) {
    return move<true>(w, velocity, gradients, sources, count, rule);
}
