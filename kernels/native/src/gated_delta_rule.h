// The gated delta rule over some columns of a head's state, for one instruction set: included in a namespace that has
// its vectors, with HEADRACE_TARGET set.
//
// A state's columns have nothing to do with each other, so a few of them pass through all tokens by themselves, in the
// first-level cache. Tokens change them four at a time. With S the state that the four find, d_i what token i has left
// of it, and d_ij what token i has left of what token j wrote, the change of token i is
//     c_i = beta_i (v_i - d_i S'k_i - sum over j < i of d_ij (k_j . k_i) c_j),
// its output d_i S'q_i + sum over j <= i of d_ij (k_j . q_i) c_j, and the state that the four leave d_n S + sum of
// d_nj k_j c_j' (the chunks of arXiv 2406.06484 and 2412.06464, small enough that all of it but S stays in registers).
// So one sweep over S makes the state that four tokens leave, and its products with the next four's keys and queries.

// Sums over a state's rows for each column: of each token's key, then each one's query.
template <int kVectors>
struct Products {
    Vector of_keys[kGroup][kVectors], of_queries[kGroup][kVectors];
};

// What a group makes of the state: `kept` of it is left, and of each token's key times its change.
template <int kVectors>
struct Changes {
    float kept;
    Vector of[kGroup][kVectors];
};

enum class Target { none, cached, streamed };

// The state after `kBefore` tokens' changes, and its products with the keys and queries of the `kNow` next ones. All
// loops over registers are unrolled early: else the compiler keeps some in memory.
template <int kBefore, int kNow, int kVectors, Target kTarget>
HEADRACE_TARGET void sweep(const Block& block, std::int64_t key_dim, const Group* before,
                           const Changes<kVectors>& changes, const Group* now, Products<kVectors>& products) {
    Vector change[kBefore + 1][kVectors], of_keys[kNow + 1][kVectors], of_queries[kNow + 1][kVectors], state[kVectors];
    const Vector kept = set(kBefore > 0 ? changes.kept : 1.0f);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int i = 0; i < kBefore; ++i) {
            change[i][v] = changes.of[i][v];
        }
#pragma GCC unroll 4
        for (int i = 0; i < kNow; ++i) {
            of_keys[i][v] = of_queries[i][v] = zero();
        }
    }
    const float* source = block.source;
    float* target = block.target;
    const std::int64_t source_stride = block.source_stride, target_stride = block.target_stride;
    for (std::int64_t row = 0; row < key_dim; ++row, source += source_stride, target += target_stride) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            state[v] = load(source + v * kLanes);
            if constexpr (kBefore > 0) {
                state[v] = multiply(state[v], kept);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kBefore; ++i) {
            const Vector key = set(before->rows[i][row]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                state[v] = multiply_add(key, change[i][v], state[v]);
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            if constexpr (kTarget == Target::cached) {
                store(target + v * kLanes, state[v]);
            } else if constexpr (kTarget == Target::streamed) {
                stream(target + v * kLanes, state[v]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kNow; ++i) {
            const Vector key = set(now->rows[i][row]), query = set(now->rows[kGroup + i][row]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                of_keys[i][v] = multiply_add(key, state[v], of_keys[i][v]);
                of_queries[i][v] = multiply_add(query, state[v], of_queries[i][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int i = 0; i < kNow; ++i) {
            products.of_keys[i][v] = of_keys[i][v];
            products.of_queries[i][v] = of_queries[i][v];
        }
    }
}

template <int kVectors>
using Sweep = void (*)(const Block&, std::int64_t, const Group*, const Changes<kVectors>&, const Group*,
                       Products<kVectors>&);

// By the number of tokens: products alone, with a copy of the state, after a whole group, and changes alone.
template <int kVectors>
constexpr Sweep<kVectors> kBegin[kGroup + 1] = {
    nullptr, sweep<0, 1, kVectors, Target::none>, sweep<0, 2, kVectors, Target::none>,
    sweep<0, 3, kVectors, Target::none>, sweep<0, 4, kVectors, Target::none>};
template <int kVectors>
constexpr Sweep<kVectors> kCopy = sweep<0, kGroup, kVectors, Target::cached>;
template <int kVectors>
constexpr Sweep<kVectors> kGoOn[kGroup + 1] = {
    nullptr, sweep<kGroup, 1, kVectors, Target::cached>, sweep<kGroup, 2, kVectors, Target::cached>,
    sweep<kGroup, 3, kVectors, Target::cached>, sweep<kGroup, 4, kVectors, Target::cached>};
template <int kVectors, Target kTarget>
constexpr Sweep<kVectors> kEnd[kGroup + 1] = {nullptr, sweep<1, 0, kVectors, kTarget>, sweep<2, 0, kVectors, kTarget>,
                                              sweep<3, 0, kVectors, kTarget>, sweep<4, 0, kVectors, kTarget>};

// A head's rows of values and outputs at some columns.
template <class Element>
struct Values {
    const Element* values;
    std::int64_t stride;
    Element* output;
    std::int64_t output_stride;

    Values from(std::int64_t token) const {
        return {values + token * stride, stride, output + token * output_stride, output_stride};
    }

    // Rows lie too far apart for the processor to guess.
    void fetch(int count, int num_columns) const {
        for (int i = 0; i < count; ++i) {
            for (int column = 0; column < num_columns; column += kLineBytes / sizeof(Element)) {
                __builtin_prefetch(values + i * stride + column);
                __builtin_prefetch(output + i * output_stride + column, 1);
            }
        }
    }
};

// Writes a group's outputs, and leaves its changes.
template <class Element, int kVectors>
HEADRACE_TARGET void solve(int count, const Factors& factors, const Products<kVectors>& products,
                           const Values<Element>& rows, Changes<kVectors>& changes) {
    for (int i = 0; i < count; ++i) {
        const Vector kept = set(factors.kept[i]), written = set(factors.written[i]);
        for (int v = 0; v < kVectors; ++v) {
            Vector rest = load(rows.values + i * rows.stride + v * kLanes);
            rest = negated_multiply_add(kept, products.of_keys[i][v], rest);
            Vector output = multiply(kept, products.of_queries[i][v]);
            for (int j = 0; j < i; ++j) {
                rest = negated_multiply_add(set(factors.of_keys[i][j]), changes.of[j][v], rest);
                output = multiply_add(set(factors.of_queries[i][j]), changes.of[j][v], output);
            }
            changes.of[i][v] = multiply(written, rest);
            output = multiply_add(set(factors.of_queries[i][i]), changes.of[i][v], output);
            store(rows.output + i * rows.output_stride + v * kLanes, output);
        }
    }
    for (int i = 0; i + 1 < count; ++i) {
        for (int v = 0; v < kVectors; ++v) {
            changes.of[i][v] = multiply(set(factors.left[i]), changes.of[i][v]);
        }
    }
    changes.kept = factors.kept[count - 1];
}

// Whether columns are written past the caches, which would only fetch them to be overwritten; parts of a line are not.
inline bool is_streamed(const Block& block, std::int64_t num_columns) {
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(block.target) % kLineBytes == 0;
    return block.source != block.target && is_aligned && num_columns * sizeof(float) >= kLineBytes;
}

// Some columns through all groups of a chunk.
template <class Element, int kVectors>
HEADRACE_TARGET void walk(const Block& block, std::int64_t key_dim, const Group* groups, const Factors* factors,
                          int num_groups, const Values<Element>& rows) {
    alignas(64) float copy[kMaxKeyDim * kVectors * kLanes];
    constexpr std::int64_t kStride = kVectors * kLanes;
    Products<kVectors> products;
    Changes<kVectors> changes = {};
    Block now = {block.source, block.source_stride, copy, kStride};
    const auto begin = num_groups == 1 ? kBegin<kVectors>[groups[0].count] : kCopy<kVectors>;
    rows.fetch(groups[0].count, kStride);
    begin(now, key_dim, nullptr, changes, groups, products);
    solve<Element, kVectors>(groups[0].count, factors[0], products, rows, changes);
    for (int g = 1; g < num_groups; ++g) {
        now = {copy, kStride, copy, kStride};
        rows.from(g * kGroup).fetch(groups[g].count, kStride);
        kGoOn<kVectors>[groups[g].count](now, key_dim, groups + g - 1, changes, groups + g, products);
        solve<Element, kVectors>(groups[g].count, factors[g], products, rows.from(g * kGroup), changes);
    }
    now.target = block.target;
    now.target_stride = block.target_stride;
    const Group& last = groups[num_groups - 1];
    const auto& end = is_streamed(block, kStride) ? kEnd<kVectors, Target::streamed> : kEnd<kVectors, Target::cached>;
    end[last.count](now, key_dim, &last, changes, nullptr, products);
}

// Some columns through a lone token, which leaves room for more of them.
template <class Element, int kVectors>
HEADRACE_TARGET void walk_lone(const Block& block, std::int64_t key_dim, const Group& group, const Factors& factors,
                               const Values<Element>& rows) {
    Products<kVectors> products;
    Changes<kVectors> changes = {};
    sweep<0, 1, kVectors, Target::none>(block, key_dim, nullptr, changes, &group, products);
    solve<Element, kVectors>(1, factors, products, rows, changes);
    const auto end = is_streamed(block, kVectors * kLanes) ? sweep<1, 0, kVectors, Target::streamed>
                                                           : sweep<1, 0, kVectors, Target::cached>;
    end(block, key_dim, &group, changes, nullptr, products);
}

template <class Element>
HEADRACE_TARGET float length_of(const Element* row, std::int64_t size) {
    Vector total = zero();
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const Vector x = load(row + i);
        total = multiply_add(x, x, total);
    }
    return __builtin_sqrtf(sum_of(total) + 1e-6f);
}

template <class Element>
HEADRACE_TARGET void scale_row(const Element* row, float scale, std::int64_t size, float* output) {
    for (std::int64_t i = 0; i < size; i += kLanes) {
        store(output + i, multiply(load(row + i), set(scale)));
    }
}

HEADRACE_TARGET inline float dot(const float* a, const float* b, std::int64_t size) {
    Vector total = zero();
    for (std::int64_t i = 0; i < size; i += kLanes) {
        total = multiply_add(load(a + i), load(b + i), total);
    }
    return sum_of(total);
}

template <class Element>
inline void fetch_rows(const Element* rows, std::int64_t stride, int count, std::int64_t size) {
    for (int i = 0; i < count; ++i) {
        for (std::int64_t column = 0; column < size; column += kLineBytes / sizeof(Element)) {
            __builtin_prefetch(rows + i * stride + column);
        }
    }
}

// Keys and queries of `count` tokens, whose rows are `stride` apart.
template <class Element>
HEADRACE_TARGET void make_ready(const Element* keys, const Element* queries, std::int64_t stride, std::int64_t key_dim,
                                int count, Group& group) {
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(key_dim));
    group.count = count;
    for (int i = 0; i < count; ++i) {
        const Element *key = keys + i * stride, *query = queries + i * stride;
        scale_row(key, 1.0f / length_of(key, key_dim), key_dim, group.rows[i]);
        scale_row(query, scale / length_of(query, key_dim), key_dim, group.rows[kGroup + i]);
        for (int j = 0; j <= i; ++j) {
            group.query_products[i][j] = dot(group.rows[kGroup + i], group.rows[j], key_dim);
            if (j < i) {
                group.key_products[i][j] = dot(group.rows[i], group.rows[j], key_dim);
            }
        }
    }
}

// A chunk of a sequence's tokens, from `token` on, ready for use.
struct Chunk {
    std::int64_t token;
    int num_groups;
    Group groups[kChunk / kGroup];
    Factors factors[kChunk / kGroup];

    static Chunk& of_this_thread() {
        thread_local std::vector<Chunk> chunk(1);
        return chunk[0];
    }
};

// The columns of one head through a chunk. source, target: the head's state.
template <class Element>
HEADRACE_TARGET void walk_head(const RuleCall& call, const Columns& columns, const Chunk& chunk, const float* source,
                               float* target) {
    const std::int64_t values_at = 2 * call.num_key_heads * call.key_dim + columns.head * call.value_dim;
    const std::int64_t output_stride = call.num_heads * call.value_dim;
    const Element* values = static_cast<const Element*>(call.mixed) + chunk.token * call.mixed_stride + values_at;
    Element* output = static_cast<Element*>(call.output) + chunk.token * output_stride + columns.head * call.value_dim;
    const bool is_lone = chunk.num_groups == 1 && chunk.groups[0].count == 1;
    for (std::int64_t column = columns.first; column < columns.end;) {
        const std::int64_t left = (columns.end - column) / kLanes;
        const Block block = {source + column, call.value_dim, target + column, call.value_dim};
        const Values<Element> rows = {values + column, call.mixed_stride, output + column, output_stride};
        if (is_lone && left >= kWideVectors) {
            walk_lone<Element, kWideVectors>(block, call.key_dim, chunk.groups[0], chunk.factors[0], rows);
            column += kWideVectors * kLanes;
        } else if (left >= kVectors) {
            walk<Element, kVectors>(block, call.key_dim, chunk.groups, chunk.factors, chunk.num_groups, rows);
            column += kVectors * kLanes;
        } else {
            walk<Element, 1>(block, call.key_dim, chunk.groups, chunk.factors, chunk.num_groups, rows);
            column += kLanes;
        }
    }
}

// Makes the next tokens ready, from `chunk.token` to before `end_token`, as many as a chunk has.
template <class Element>
HEADRACE_TARGET void fill(const RuleCall& call, std::int64_t key_head, std::int64_t end_token, Chunk& chunk) {
    const int num_tokens = static_cast<int>(std::min<std::int64_t>(kChunk, end_token - chunk.token));
    const Element* queries = static_cast<const Element*>(call.mixed) + chunk.token * call.mixed_stride;
    queries += key_head * call.key_dim;
    const Element* keys = queries + call.num_key_heads * call.key_dim;
    chunk.num_groups = (num_tokens + kGroup - 1) / kGroup;
    for (int i = 0; i < num_tokens; i += kGroup) {
        const std::int64_t place = i * call.mixed_stride, next = place + kGroup * call.mixed_stride;
        const int num_next = std::clamp(num_tokens - i - kGroup, 0, kGroup);
        fetch_rows(queries + next, call.mixed_stride, num_next, call.key_dim);
        fetch_rows(keys + next, call.mixed_stride, num_next, call.key_dim);
        make_ready(keys + place, queries + place, call.mixed_stride, call.key_dim, std::min(kGroup, num_tokens - i),
                   chunk.groups[i / kGroup]);
    }
}

// A part of one key head's heads and columns, for all tokens of a sequence.
template <class Element>
HEADRACE_TARGET void run_part(const RuleCall& call, const Parts& parts, std::int64_t piece) {
    const std::int64_t part = piece % parts.count, key_head = piece / parts.count % call.num_key_heads;
    const std::int64_t sequence = piece / parts.count / call.num_key_heads;
    const std::int64_t end = parts.first_block(part + 1), state_size = call.key_dim * call.value_dim;
    const std::int64_t end_token = call.slots.starts[sequence + 1];
    const float* source = call.states + call.slots.read[sequence] * call.slot_stride;
    float* const target = call.states + call.slots.write[sequence] * call.slot_stride;
    Chunk& chunk = Chunk::of_this_thread();
    for (chunk.token = call.slots.starts[sequence]; chunk.token < end_token; chunk.token += kChunk, source = target) {
        fill<Element>(call, key_head, end_token, chunk);
        for (std::int64_t block = parts.first_block(part), next; block < end; block = next) {
            const std::int64_t group_head = block / parts.per_head, head = key_head * parts.group + group_head;
            next = std::min(end, (group_head + 1) * parts.per_head);
            const std::int64_t begin = block % parts.per_head * kPartColumns;
            const Columns columns = {head, begin, std::min(call.value_dim, begin + (next - block) * kPartColumns)};
            find_factors<Element>(call, head, chunk.token, chunk.groups, chunk.num_groups, chunk.factors);
            walk_head<Element>(call, columns, chunk, source + head * state_size, target + head * state_size);
        }
    }
    // What was written past the caches is there for whoever waits for this thread.
    _mm_sfence();
}

template <class Element>
void run_rule(const RuleCall& call) {
    const Parts parts(call);
    pieces::share(call.slots.num_sequences * call.num_key_heads * parts.count, parts.is_worth_threads,
                  [&](std::int64_t piece) { run_part<Element>(call, parts, piece); });
}
