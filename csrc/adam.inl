// Source of the Adam kernel, included by kernels.inl.

#if PHALANX_REGISTER == 64
ALWAYS Floats root(Floats v) { return (Floats)_mm512_sqrt_ps((__m512)v); }
#elif PHALANX_REGISTER == 32
ALWAYS Floats root(Floats v) { return (Floats)_mm256_sqrt_ps((__m256)v); }
#else
ALWAYS Floats root(Floats v) {
    for (int k = 0; k < lanes; ++k) v[k] = __builtin_sqrtf(v[k]);
    return v;
}
#endif

ALWAYS void adam_step(Floats& w, Floats& first, Floats& second, Floats sum, const AdamRule& rule) {
    const Floats g = sum * rule.scale + rule.l2 * w;
    first += rule.take1 * (g - first);
    second = rule.beta2 * second + rule.take2 * (g * g);
    w = rule.keep * w - rule.rate * (first / (root(second) * rule.correction + rule.eps));
}

void adam(float* w, float* first, float* second, const float* const* gradients, int sources, std::size_t count,
          const AdamRule& given) {
    const AdamRule rule = given;  // a copy, so that no store to w can change it
    std::size_t at = 0;
    for (; at + lanes <= count; at += lanes) {
        if (at % sixteen == 0) {
            __builtin_prefetch(w + at + ahead, 1);
            __builtin_prefetch(first + at + ahead, 1);
            __builtin_prefetch(second + at + ahead, 1);
            ask_for_gradients(gradients, sources, at);
        }
        Floats weight = load<Floats>(w + at), m = load<Floats>(first + at), v = load<Floats>(second + at);
        adam_step(weight, m, v, summed(gradients, sources, at), rule);
        store(first + at, m);
        store(second + at, v);
        store(w + at, weight);
    }
    if (at == count) return;
    // the last few elements: same arithmetic, on copies padded with zeros
    const std::size_t rest = count - at, bytes = rest * sizeof(float);
    float sum[lanes], padded_w[lanes] = {}, padded_m[lanes] = {}, padded_v[lanes] = {};
    sum_rest(sum, gradients, sources, at, rest);
    __builtin_memcpy(padded_w, w + at, bytes);
    __builtin_memcpy(padded_m, first + at, bytes);
    __builtin_memcpy(padded_v, second + at, bytes);
    Floats weight = load<Floats>(padded_w), m = load<Floats>(padded_m), v = load<Floats>(padded_v);
    adam_step(weight, m, v, load<Floats>(sum), rule);
    store(padded_w, weight);
    store(padded_m, m);
    store(padded_v, v);
    __builtin_memcpy(w + at, padded_w, bytes);
    __builtin_memcpy(first + at, padded_m, bytes);
    __builtin_memcpy(second + at, padded_v, bytes);
}
