// Source of the kernels for low-rank gradients, included by kernels.inl. A gradient M of rows x columns is sent as P of rows x rank
// and Q of rank x columns, all stored row by row. src/phalanx/grad/wires/low_rank.py says what for.

constexpr int together = 4;  // rows of Q that share one pass over a row of M, which the cache still holds in the next pass

// Call `pass` with up to `together` rows of Q at a time, as a constant, and whether these are the last.
template <class Pass>
ALWAYS void by_rows(std::size_t rank, Pass pass) {
    std::size_t k = 0;
    for (; k + together < rank; k += together) pass(std::integral_constant<int, together>{}, k, false);
    switch (rank - k) {
        case 1: return pass(std::integral_constant<int, 1>{}, k, true);
        case 2: return pass(std::integral_constant<int, 2>{}, k, true);
        case 3: return pass(std::integral_constant<int, 3>{}, k, true);
        case 4: return pass(std::integral_constant<int, 4>{}, k, true);
    }
}

// m = m - p[0] * q[0] - p[1] * q[1] ...; plus x, if there is one.
template <int count>
ALWAYS void subtract(float* m, const float* x, const float* p, const float* q, std::size_t columns) {
    std::size_t j = 0;
    for (; j + lanes <= columns; j += lanes) {
        Floats v = load<Floats>(m + j);
        for (int k = 0; k < count; ++k) v = v - p[k] * load<Floats>(q + static_cast<std::size_t>(k) * columns + j);
        store(m + j, x == nullptr ? v : v + load<Floats>(x + j));
    }
    for (; j < columns; ++j) {
        float v = m[j];
        for (int k = 0; k < count; ++k) v = v - p[k] * q[static_cast<std::size_t>(k) * columns + j];
        m[j] = x == nullptr ? v : v + x[j];
    }
}

// p[k] = the inner product of m and row k of q.
template <int count>
ALWAYS void multiply(const float* m, const float* q, float* p, std::size_t columns) {
    Floats sums[count] = {};
    float rest[count] = {};
    std::size_t j = 0;
    for (; j + lanes <= columns; j += lanes) {
        const Floats v = load<Floats>(m + j);
        for (int k = 0; k < count; ++k) sums[k] = sums[k] + v * load<Floats>(q + static_cast<std::size_t>(k) * columns + j);
    }
    for (; j < columns; ++j)
        for (int k = 0; k < count; ++k) rest[k] += m[j] * q[static_cast<std::size_t>(k) * columns + j];
    for (int k = 0; k < count; ++k) {
        for (int lane = 0; lane < lanes; ++lane) rest[k] += sums[k][lane];
        p[k] = rest[k];
    }
}

void advance(const float* x, float* m, float* p, const float* q, const Shape& shape) {
    const std::size_t columns = shape.columns;
    for (std::size_t i = 0; i < shape.rows; ++i, m += columns, p += shape.rank) {
        by_rows(shape.rank, [&](auto count, std::size_t k, bool last) {
            subtract<count>(m, last ? x : nullptr, p + k, q + k * columns, columns);
        });
        by_rows(shape.rank, [&](auto count, std::size_t k, bool) { multiply<count>(m, q + k * columns, p + k, columns); });
        if (x != nullptr) x += columns;
    }
}

void expand(const float* p, const float* q, float* x, const Shape& shape, float factor) {
    const std::size_t columns = shape.columns;
    const Floats each = all_of(factor);
    for (std::size_t i = 0; i < shape.rows; ++i, x += columns, p += shape.rank) {
        std::size_t j = 0;
        for (; j + lanes <= columns; j += lanes) {
            Floats v = p[0] * load<Floats>(q + j);
            for (std::size_t k = 1; k < shape.rank; ++k) v = v + p[k] * load<Floats>(q + k * columns + j);
            store(x + j, v * each);
        }
        for (; j < columns; ++j) {
            float v = p[0] * q[j];
            for (std::size_t k = 1; k < shape.rank; ++k) v = v + p[k] * q[k * columns + j];
            x[j] = v * factor;
        }
    }
}
