// x @ weightᵀ for any number of rows, on a processor with AVX-512: in bfloat16 whose products are AVX-512's dot product
// alone, and in float32.

#include "packed_tile.h"

#ifdef HEADRACE_X86
namespace packed {

// So many rows of x stay in the second-level cache while all blocks pass by: `cached_rows`.
template <class Kind>
void multiply_all(const Call& call, std::int64_t cached_rows, bool is_worth_threads) {
    const std::int64_t block_bytes = call.depth / Kind::kInputs * Kind::kBytes;
    product::for_each_tile<kBlock, kMaxRows>(
        call.num_rows, call.num_outputs, cached_rows, is_worth_threads,
        [&](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            const char* block = static_cast<const char*>(call.weight) + column / kBlock * block_bytes;
            (is_first ? kMultiply<Kind, true> : kMultiply<Kind, false>)[count](call, block, row, column);
        });
}

}  // namespace packed

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_packed_product(const product::Call* call) {
    packed::multiply_all<packed::Bfloat16>(*call, 96, true);
}

// The same in float32.
HEADRACE_API void headrace_packed_float32_product(const product::Call* call) {
    const std::int64_t cached_rows = std::max<std::int64_t>(packed::kMaxRows, 65536 / call->depth);
    const bool is_worth_threads = call->num_rows * call->num_outputs * call->depth > 1 << 17;
    const auto multiply_all = call->is_narrow ? packed::multiply_all<packed::NarrowFloat32> : packed::multiply_all<packed::Float32>;
    multiply_all(*call, cached_rows, is_worth_threads);
}
#endif
