// Random collectives against their known results, for sanitizers: stress threads|processes RANKS OPERATIONS SEED
//
// ThreadSanitizer sees races between threads of one address space only, so ranks are threads that share one mapping there;
// AddressSanitizer runs them as processes that map the memory themselves. Values are small integers: sums are exact.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "../../csrc/team.hpp"

using namespace phalanx;

namespace {

constexpr std::size_t part_bytes = 1 << 20;

[[noreturn]] void die(int rank, int number, const char* what, std::size_t at) {
    std::fprintf(stderr, "rank %d, operation %d: %s, element %zu\n", rank, number, what, at);
    std::_Exit(1);
}

float value(int rank, int number, std::size_t i) {
    return static_cast<float>((static_cast<std::size_t>(rank * 7 + number) + i) % 17);
}

// One copy of parameters and velocities moves by minus the sum of all gradients. With LARS three times, and before the last one
// somebody writes to w; a trust of 1 makes a step as long as w is.
void update(Team& team, float* gradients, float* shared, std::size_t count, int number, bool lars) {
    const std::size_t room = part_bytes / 12;  // elements: parameters, velocities, squares
    count = std::min(count, room);
    float *w = shared, *v = shared + room;
    const double half = static_cast<double>(count / 2), rest = static_cast<double>(count - count / 2), trust = 1;
    const TensorRow first{0, half, 1, 0, 0, 0, 1, double(lars), trust, 0}, second{half, rest, 1, 0, 0, 0, 1, double(lars), trust, 0};
    const TensorRow rows[2] = {first, second};
    const auto meet = [&] {
        if (team.barrier() != Status::ok) die(team.rank(), number, "barrier", 0);
    };
    std::vector<double> wanted(count, lars ? 1 : 0), sum(count);
    for (std::size_t i = 0; i < count; ++i)
        for (int r = 0; r < team.size(); ++r) sum[i] += value(r, number, i);
    for (int turn = 0; turn < (lars ? 3 : 1); ++turn) {
        if (team.rank() == 0)
            for (std::size_t i = 0; i < count; ++i) {
                w[i] = turn == 0 ? lars : turn == 2 ? 2 * w[i] : w[i];
                v[i] = turn == 0 ? 0 : v[i];
            }
        meet();
        auto* squares = reinterpret_cast<ChunkSquares*>(shared + 2 * room);
        if (team.update({gradients, w, v, squares, turn > 0, rows, 2, 1.0}) != Status::ok) die(team.rank(), number, "update", 0);
        for (const TensorRow& row : rows) {
            const std::size_t from = static_cast<std::size_t>(row.offset), to = from + static_cast<std::size_t>(row.count);
            double ww = 0, gg = 0;
            for (std::size_t i = from; i < to; ++i) {
                wanted[i] *= turn == 2 ? 2 : 1;
                ww += wanted[i] * wanted[i];
                gg += sum[i] * sum[i];
            }
            const double ratio = lars && ww != 0 && gg != 0 ? std::sqrt(ww / gg) : 1;
            for (std::size_t i = from; i < to; ++i) {
                wanted[i] -= ratio * sum[i];
                const double tolerance = lars ? 1e-4 * (1 + std::abs(wanted[i])) : 0;
                if (std::abs(w[i] - wanted[i]) > tolerance) die(team.rank(), number, "wrong parameter", i);
            }
        }
        meet();
    }
}

// Three steps of Adam, or of AdamW, on one copy of parameters and moments.
void adam(Team& team, float* gradients, float* shared, std::size_t count, int number, bool decoupled) {
    const std::size_t room = part_bytes / 12;
    count = std::min(count, room);
    float *w = shared, *m = shared + room, *v = shared + 2 * room;
    if (team.rank() == 0)
        for (std::size_t i = 0; i < count; ++i) {
            w[i] = 1;
            m[i] = v[i] = 0;
        }
    if (team.barrier() != Status::ok) die(team.rank(), number, "barrier", 0);
    std::vector<double> weight(count, 1), first(count), second(count);
    for (int step = 1; step <= 3; ++step) {
        const AdamRow row{0, double(count), 0.1, 0.9, 0.99, 1e-8, 0.5, double(decoupled), double(step)};
        if (team.update(FusedAdam{gradients, w, m, v, &row, 1, 1.0}) != Status::ok) die(team.rank(), number, "adam", 0);
        for (std::size_t i = 0; i < count; ++i) {
            double g = decoupled ? 0 : 0.5 * weight[i];
            for (int r = 0; r < team.size(); ++r) g += value(r, number, i);
            first[i] = 0.9 * first[i] + 0.1 * g;
            second[i] = 0.99 * second[i] + 0.01 * g * g;
            const double root = std::sqrt(second[i] / (1 - std::pow(0.99, step))) + 1e-8;
            weight[i] = weight[i] * (decoupled ? 0.95 : 1) - 0.1 / (1 - std::pow(0.9, step)) * first[i] / root;
            if (std::abs(w[i] - weight[i]) > 1e-4) die(team.rank(), number, "wrong parameter after Adam", i);
        }
        if (team.barrier() != Status::ok) die(team.rank(), number, "barrier", 0);
    }
}

void play(Team& team, char* arena, char* shared, int operations, unsigned seed) {
    const int size = team.size(), rank = team.rank();
    const std::size_t ranks = static_cast<std::size_t>(size);
    std::mt19937 random(seed);  // the same calls on all ranks
    std::vector<float> own(part_bytes / 4);
    for (int number = 0; number < operations; ++number) {
        const int verb = static_cast<int>(random() % 7);
        const bool staged = random() % 2;
        const std::size_t limit = random() % 4 == 0 ? 200'000 : 2'000;
        std::size_t count = random() % limit;
        const std::size_t offset = random() % 1000;
        const int root = static_cast<int>(random() % ranks);
        const unsigned nap = random() % 50;
        float* x = staged && verb < 5 ? own.data() + offset : reinterpret_cast<float*>(arena) + offset;
        for (std::size_t i = 0; i < count; ++i) x[i] = value(rank, number, i);
        if (nap == static_cast<unsigned>(rank)) usleep(200);  // somebody is late now and then

        Status status = Status::ok;
        if (verb == 0) status = team.barrier();
        if (verb == 1) status = team.all_reduce(x, count, Type::f32, Op::sum, 2.0);
        if (verb == 2) status = team.reduce_scatter(x, count, Type::f32, Op::max, 1.0);
        if (verb == 3) status = team.all_gather(x, count, Type::f32);
        if (verb == 4) status = team.broadcast(x, count, Type::f32, root);
        if (verb >= 5) {
            const auto step = verb == 5 ? update : adam;
            step(team, reinterpret_cast<float*>(arena) + offset, reinterpret_cast<float*>(shared), count, number, staged);
            continue;
        }
        if (status != Status::ok) die(rank, number, "did not succeed", static_cast<std::size_t>(status));

        for (std::size_t i = 0; i < count; ++i) {
            std::size_t owner = 0;
            while (i >= count * (owner + 1) / ranks) ++owner;
            float wanted = value(rank, number, i), sum = 0, most = 0;
            for (int r = 0; r < size; ++r) {
                sum += value(r, number, i);
                most = std::max(most, value(r, number, i));
            }
            if (verb == 1) wanted = 2 * sum;
            if (verb == 2 && owner == static_cast<std::size_t>(rank)) wanted = most;
            if (verb == 3) wanted = value(static_cast<int>(owner), number, i);
            if (verb == 4) wanted = value(root, number, i);
            if (x[i] != wanted) {
                std::fprintf(stderr, "verb %d, %s, %zu elements at %zu: got %g, wanted %g\n", verb, staged ? "staged" : "arena",
                             count, offset, static_cast<double>(x[i]), static_cast<double>(wanted));
                die(rank, number, "wrong value", i);
            }
        }
    }
}

int threads(int size, int operations, unsigned seed) {
    const auto control = Segment::anonymous(round_to_pages(Team::control_bytes(size)));
    Arena arena;
    arena.id = 1;
    arena.bytes = arena.stride = part_bytes;
    arena.segment = Segment::anonymous(part_bytes * static_cast<std::size_t>(size));
    Arena shared;
    shared.id = 2;
    shared.bytes = part_bytes;
    shared.segment = Segment::anonymous(part_bytes);
    std::vector<std::unique_ptr<Team>> teams;
    for (int r = 0; r < size; ++r) teams.push_back(std::make_unique<Team>(control, r, size));
    for (auto& team : teams) {
        team->meet();
        team->adopt(arena);
        team->adopt(shared);
    }
    std::vector<std::thread> ranks;
    for (int r = 0; r < size; ++r) ranks.emplace_back([&, r] { play(*teams[r], arena.part(r), shared.part(r), operations, seed); });
    for (std::thread& rank : ranks) rank.join();
    return 0;
}

int processes(int size, int operations, unsigned seed) {
    const auto control = Segment::anonymous(round_to_pages(Team::control_bytes(size)));
    int ready[2], go[2];
    if (pipe(ready) != 0 || pipe(go) != 0) return 1;
    std::vector<pid_t> children;
    for (int r = 0; r < size; ++r) {
        const pid_t child = fork();
        if (child == 0) {
            Team team(control, r, size);
            char byte = 0;
            if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1) std::_Exit(1);  // all have entered
            team.meet();
            team.set_timeout(60);
            team.set_method(seed % 2 ? Method::named : Method::memfd);
            Arena arena, shared;
            if (team.allocate(part_bytes, false, arena) != Status::ok || team.allocate(part_bytes, true, shared) != Status::ok)
                die(r, 0, ("allocate: " + team.failure().refusal).c_str(), 0);
            play(team, arena.part(r), shared.part(r), operations, seed);
            if (team.release(shared.id) != Status::ok) die(r, 0, "release", 0);
            team.leave();
            std::exit(0);  // with the leak check
        }
        children.push_back(child);
    }
    char byte = 0;
    for (int r = 0; r < size; ++r)
        if (read(ready[0], &byte, 1) != 1) return 1;
    for (int r = 0; r < size; ++r)
        if (write(go[1], &byte, 1) != 1) return 1;
    int failed = 0;
    for (pid_t child : children) {
        int how = 0;
        waitpid(child, &how, 0);
        failed += how != 0;
    }
    return failed;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    const int size = std::atoi(argv[2]), operations = std::atoi(argv[3]);
    const unsigned seed = static_cast<unsigned>(std::atoi(argv[4]));
    const int failed = std::strcmp(argv[1], "threads") == 0 ? threads(size, operations, seed) : processes(size, operations, seed);
    std::printf("%s: %d ranks, %d operations, %s\n", argv[1], size, operations, failed ? "FAILED" : "ok");
    return failed;
}
