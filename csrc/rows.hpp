// Shared by all update tables: each row describes one tensor, in doubles, so that Python passes one matrix.
#pragma once

#include <cmath>
#include <stdexcept>

namespace phalanx {

// Offset and count must be integers that a double holds exactly.
template <class Row>
void check_row(const Row& row) {
    const auto whole = [](double n) { return n >= 0 && n <= 1e15 && n == std::floor(n); };  // false for NaN
    if (!whole(row.offset) || !whole(row.count))
        throw std::invalid_argument("offset and count of a tensor are whole numbers from 0 on");
}

}  // namespace phalanx
