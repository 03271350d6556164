// A linear layer in int8: rows are quantised as they come, multiplied by int8 weights, and scaled back.

#include "int8_call.h"
#include "int8_products.h"

#ifdef HEADRACE_X86
#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace int8 {

// What a thread's second-level cache should hold of either side.
constexpr std::int64_t kCachedBytes = 768 * 1024;
// Products of fewer multiplications are over before a second thread has begun.
constexpr std::int64_t kWorkWorthThreads = 1 << 18;

struct Range {
    std::int64_t begin, end;
};

std::int64_t blocks_in(std::int64_t size) { return (size + kBlock - 1) / kBlock; }

// Part `index` of `count` of a size, cut between blocks.
Range part(std::int64_t size, std::int64_t index, std::int64_t count) {
    const std::int64_t blocks = blocks_in(size);
    return {blocks * index / count * kBlock, std::min(blocks * (index + 1) / count * kBlock, size)};
}

// Into how many parts the rows are cut; the columns are cut into the other factor of the number of threads. The
// threads' work should be equal first, and then little be read by each.
std::int64_t num_row_parts(const Call& call, std::int64_t num_threads) {
    std::int64_t best = 1, least = INT64_MAX;
    for (std::int64_t parts = 1; parts <= num_threads; ++parts) {
        if (num_threads % parts != 0) {
            continue;
        }
        const std::int64_t rows = blocks_in((call.num_rows + parts - 1) / parts);
        const std::int64_t columns = blocks_in((call.num_outputs * parts + num_threads - 1) / num_threads);
        const std::int64_t cost = 16 * rows * columns + rows + columns;
        if (cost < least) {
            best = parts;
            least = cost;
        }
    }
    return best;
}

// The block of the output at a row and a column, or what of it lies before the ends.
template <typename Element>
HEADRACE_AVX512 Pending<Element> block_at(const Call& call, const std::int32_t* sums, std::int64_t row,
                                          std::int64_t end_row, std::int64_t column, std::int64_t end_column) {
    Pending<Element> block;
    block.sums = sums;
    block.row_scales = call.row_scales + row;
    block.column_scales = call.column_scales + column;
    block.biases = call.biases + column;
    block.output = static_cast<Element*>(call.output) + row * call.num_outputs + column;
    block.output_stride = call.num_outputs;
    block.num_rows = static_cast<int>(std::min<std::int64_t>(kBlock, end_row - row));
    block.num_columns = static_cast<int>(std::min<std::int64_t>(kBlock, end_column - column));
    return block;
}

// Some rows times some columns, so few that both stay in the cache.
template <typename Product, typename Element>
HEADRACE_AMX_INT8 void multiply_cached(const Call& call, Range rows, Range columns) {
    alignas(64) std::int32_t sums[2][kBlock * kBlock];
    Pending<Element> pending;
    const std::int64_t num_steps = call.num_steps();
    const std::int64_t width = num_steps * kStep;
    int turn = 0;
    for (std::int64_t row = rows.begin; row < rows.end; row += kBlock) {
        for (std::int64_t column = columns.begin; column < columns.end; column += kBlock) {
            const Pending<Element> block = block_at<Element>(call, sums[turn], row, rows.end, column, columns.end);
            Product::multiply(call.quantized + row * width, call.weight + column * width, num_steps, block.num_rows,
                              call.starts + column, sums[turn], pending);
            finish(pending, kBlock);
            pending = block;
            turn ^= 1;
        }
    }
    finish(pending, kBlock);
}

template <typename Product, typename Element>
HEADRACE_AMX_INT8 void multiply(const Call& call, Range rows, Range columns) {
    const std::int64_t step = std::max<std::int64_t>(1, kCachedBytes / (call.num_steps() * kStep * kBlock)) * kBlock;
    Product::begin();
    for (std::int64_t row = rows.begin; row < rows.end; row += step) {
        for (std::int64_t column = columns.begin; column < columns.end; column += step) {
            multiply_cached<Product, Element>(call, {row, std::min(row + step, rows.end)},
                                              {column, std::min(column + step, columns.end)});
        }
    }
    Product::end();
}

// A row to be quantised; one that is still to be activated becomes so in `room`, which stays in the first-level cache.
template <typename Element>
HEADRACE_AVX512 const Element* row_of(const Call& call, std::int64_t row, Element* room) {
    const Element* input = static_cast<const Element*>(call.input) + row * call.input_stride;
    if constexpr (std::is_same_v<Element, bf16>) {
        if (call.gate != Gate::none) {
            const auto activate = call.gate == Gate::silu ? activate_row<Gate::silu> : activate_row<Gate::gelu_tanh>;
            activate(input, input + call.num_inputs, call.num_inputs, room);
            return room;
        }
    }
    return input;
}

template <typename Product, typename Element>
HEADRACE_AVX512 void run(const Call& call) {
    const std::int64_t num_steps = call.num_steps();
    const bool is_small = call.num_rows * call.num_outputs * call.num_inputs < kWorkWorthThreads;
    const std::int64_t num_threads = is_small ? 1 : omp_get_max_threads();
    const std::int64_t row_parts = num_row_parts(call, num_threads), column_parts = num_threads / row_parts;
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
        std::vector<Element> room(call.gate != Gate::none ? call.num_inputs : 0);
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < call.num_rows; ++row) {
            std::uint8_t* tile = call.quantized + row / kRows * num_steps * kTile + row % kRows * kStep;
            call.row_scales[row] = quantize_row(row_of(call, row, room.data()), call.num_inputs, num_steps,
                                                Product::kFlipped, tile);
        }
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < num_threads; ++i) {
            multiply<Product, Element>(call, part(call.num_rows, i / column_parts, row_parts),
                                       part(call.num_outputs, i % column_parts, column_parts));
        }
    }
}

template <typename Element>
HEADRACE_AVX512 void choose(const Call& call) {
    if (call.num_rows == 1) {
        run<Vnni<1>, Element>(call);
    } else if (call.uses_amx) {
        run<Amx, Element>(call);
    } else {
        run<Vnni<8>, Element>(call);
    }
}

}  // namespace int8

// output = input . weight' + bias, where each row of the input and each row of the weight is int8 times a scale.
HEADRACE_API HEADRACE_AVX512 void headrace_int8_linear_bfloat16(const int8::Call* call) { int8::choose<bf16>(*call); }

HEADRACE_API HEADRACE_AVX512 void headrace_int8_linear_float32(const int8::Call* call) { int8::choose<float>(*call); }
#endif
