// Attention of new tokens over their sequences' keys and values in the paged cache; bfloat16, varlen, causal.
//
// The queries of one KV head (all sequences' new tokens, each with the heads of its group) are laid in a row, sequences
// that begin with the same blocks beside each other, and cut into tiles of sixteen. A work item is some of these tiles.
// It runs over the tree that the block tables form: keys that several of its sequences share are read once for all
// their queries (Hydragen, arXiv 2402.05099), with the softmax kept online (FlashAttention, arXiv 2205.14135), so that
// nothing has to be merged. A tile whose queries are of several sequences is computed once for each, with the others'
// lanes idle. A lone decode's few queries go another way, over the keys it shares with nobody (attention_few.h).

#include "attention_amx.h"
#include "attention_avx512.h"
#include "attention_item.h"

#ifdef HEADRACE_X86
namespace attention {

template <class Products>
HEADRACE_AVX512 void run(const Call& call, const Plan& plan) {
    const bool is_split = plan.num_splits > 1;
    const std::int64_t part_stride = std::int64_t{plan.num_items} * plan.tiles_per_item;
    const Buffer<Tile> parts = make_buffer<Tile>(is_split ? part_stride * plan.num_splits : 0);
    const int num_tasks = plan.num_items * plan.num_splits;
#pragma omp parallel num_threads(plan.num_threads)
    {
        Products::begin();
#pragma omp for schedule(dynamic, 1)
        for (int task = 0; task < num_tasks; ++task) {
            // The last ones first: a long chunk's last queries have the most keys.
            const int index = plan.num_items - 1 - task / plan.num_splits, split = task % plan.num_splits;
            Item<Products> item(call, plan, index);
            item.attend(split);
            if (is_split) {
                Tile* part = parts.get() + split * part_stride + index * plan.tiles_per_item;
                std::copy_n(item.tiles(), item.num_tiles(), part);
            } else {
                item.write();
            }
        }
        if (is_split) {
#pragma omp for schedule(dynamic, 1)
            for (int index = 0; index < plan.num_items; ++index) {
                Item<Products> item(call, plan, index);
                item.load(parts.get() + index * plan.tiles_per_item, plan.num_splits, part_stride);
                item.write();
            }
        }
        Products::end();
    }
}

}  // namespace attention

// Attention as kernels/paged_attention/native.py describes it.
HEADRACE_API HEADRACE_AVX512 void headrace_paged_attention(const attention::Call* call) {
    if (call->num_sequences == 0) {
        return;
    }
    const attention::Plan plan(*call);
    if (call->uses_amx) {
        attention::run<attention::Amx>(*call, plan);
    } else {
        attention::run<attention::Avx512>(*call, plan);
    }
}
#endif
