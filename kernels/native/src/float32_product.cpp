// x @ weightᵀ in float32 for any number of rows, on a processor with AVX2 and no AVX-512.
//
// The weight is packed: blocks of 16 outputs, in each one input after the other, [outputs / 16, inputs, 16]. An input of
// x, repeated in every lane, meets that input of 16 outputs in two instructions, and a block is read from its first byte
// to its last. A weight whose values all fit bfloat16 is kept in it and widened on the way, which is exact: with few rows
// reading it is what takes the time.

#include "float32_tile.h"

#ifdef HEADRACE_X86
namespace float32 {

// Of x so many elements stay in the second-level cache while all blocks pass by.
constexpr std::int64_t kCachedElements = 65536;
constexpr std::int64_t kWorkWorthThreads = 1 << 17;  // products of two elements

template <class Element>
void multiply_all(const Call& call) {
    const std::int64_t cached_rows = std::max(kMaxRows, kCachedElements / call.depth);
    const bool is_worth_threads = call.num_rows * call.num_outputs * call.depth > kWorkWorthThreads;
    product::for_each_tile<kBlock, kMaxRows>(
        call.num_rows, call.num_outputs, cached_rows, is_worth_threads,
        [&](bool is_first, std::int64_t count, std::int64_t row, std::int64_t column) {
            const Element* block = static_cast<const Element*>(call.weight) + column * call.depth;
            (is_first ? kMultiply<true, Element> : kMultiply<false, Element>)[count](call, block, row, column);
        });
}

}  // namespace float32

// output = x @ weightᵀ + bias.
HEADRACE_API void headrace_float32_product(const product::Call* call) {
    call->is_narrow ? float32::multiply_all<bf16>(*call) : float32::multiply_all<float>(*call);
}
#endif
