// How threads share the pieces of one call.
#pragma once

#include "common.h"

#ifdef HEADRACE_X86
#include <omp.h>

#include <atomic>
#include <vector>

namespace pieces {

// Those of one thread that nobody has begun: from `begin` to before `end`, in one word, so that each is taken once.
class alignas(64) Range {
public:
    void fill(std::uint64_t begin, std::uint64_t end) { left_.store(begin << 32 | end, std::memory_order_relaxed); }

    // The number of the first of them, which is how the thread itself goes on, or of the last; -1 if there is none.
    std::int64_t take(bool is_first) {
        std::uint64_t left = left_.load(std::memory_order_relaxed);
        while (true) {
            const std::uint64_t begin = left >> 32, end = left & UINT32_MAX;
            if (begin >= end) {
                return -1;
            }
            const std::uint64_t rest = is_first ? left + (std::uint64_t{1} << 32) : left - 1;
            if (left_.compare_exchange_weak(left, rest, std::memory_order_relaxed)) {
                return static_cast<std::int64_t>(is_first ? begin : end - 1);
            }
        }
    }

private:
    std::atomic<std::uint64_t> left_{0};
};

// do_piece(number) for `count` of them, below 2 to the power of 32, each once. A thread does neighbours one after the
// other, for which its cache has what they read, and then takes from the end of those that are slower.
template <class DoPiece>
void share(std::int64_t count, bool is_worth_threads, const DoPiece& do_piece) {
    const int num_threads = is_worth_threads ? omp_get_max_threads() : 1;
    if (num_threads == 1) {
        for (std::int64_t piece = 0; piece < count; ++piece) {
            do_piece(piece);
        }
        return;
    }
    std::vector<Range> ranges(num_threads);
    for (int i = 0; i < num_threads; ++i) {
        ranges[i].fill(count * i / num_threads, count * (i + 1) / num_threads);
    }
#pragma omp parallel num_threads(num_threads)
    {
        const int own = omp_get_thread_num();
        for (int i = 0; i < num_threads; ++i) {
            Range& range = ranges[(own + i) % num_threads];
            for (std::int64_t piece = range.take(i == 0); piece >= 0; piece = range.take(i == 0)) {
                do_piece(piece);
            }
        }
    }
}

}  // namespace pieces
#endif
