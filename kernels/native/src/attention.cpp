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
// Attention as kernels/paged_attention/native.py describes it.
HEADRACE_API void headrace_attention(const attention::Call* call) {
    if (call->uses_amx) {
        attention::run<attention::Item<attention::Amx>>(*call);
    } else {
        attention::run<attention::Item<attention::Avx512>>(*call);
    }
}
#endif
