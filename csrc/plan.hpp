// A fused update, cut into chunks that any rank may take. The rank that sums a chunk of gradients also updates the parameters.
#pragma once

#include <algorithm>
#include <vector>

#include "rows.hpp"
#include "team.hpp"

namespace phalanx {

struct Team::Plan {
    struct Chunk {
        std::uint32_t tensor;
        std::size_t first, count;  // elements of the flat buffers
    };
    const Arena* gradients = nullptr;
    std::uint64_t offset = 0;  // bytes, of the flat gradients in each part
    double scale = 1;
    std::vector<Chunk> chunks;
    std::size_t end = 0;  // elements that the flat buffers must have

    virtual ~Plan() = default;
    // Apply `verb` to chunk c; `sources` has every rank's gradient of it.
    virtual void work(Verb verb, std::size_t c, const float* const* sources, int ranks) const = 0;

    template <class Row>
    void cut(const Row* rows, std::size_t tensors) {
        for (std::size_t t = 0; t < tensors; ++t) {
            check_row(rows[t]);
            end = std::max(end, static_cast<std::size_t>(rows[t].offset) + static_cast<std::size_t>(rows[t].count));
        }
    }

    // Call it only after the buffers were found large enough: a count of 1e15 would fill memory with chunks.
    template <class Row>
    void make_chunks(const Row* rows, std::size_t tensors) {
        for (std::size_t t = 0; t < tensors; ++t) {
            const std::size_t first = static_cast<std::size_t>(rows[t].offset), count = static_cast<std::size_t>(rows[t].count);
            for (std::size_t at = 0; at < count; at += chunk_elements)
                chunks.push_back({static_cast<std::uint32_t>(t), first + at, std::min(chunk_elements, count - at)});
        }
    }
};

// Digest of the table and of the buffers' addresses, which must match on all ranks.
std::uint64_t digest_of(const void* data, std::size_t bytes, std::uint64_t seed);

}  // namespace phalanx
