// Mamba-2's scan over some columns of a head's state, for one instruction set: included as gated_delta_rule.h is.
//
// A state's columns have nothing to do with each other, so a few of them pass through all tokens by themselves, in the
// first-level cache. Tokens change them four at a time. With S the state that the four find, d_i what token i has left
// of it, and d_ij what token i has left of what token j wrote, the output of token i is
//     d_i S'C_i + sum over j <= i of d_ij step_j (C_i . B_j) x_j + skip x_i,
// and the state that the four leave d_4 S + sum of d_4j step_j B_j x_j' (arXiv 2405.21060, section 6, in chunks small
// enough that all of it but S stays in registers). So one sweep over S gives both.

// A head's inputs and outputs of some tokens, at some columns.
template <class Element>
struct ScanRows {
    const Element* inputs;
    std::int64_t stride;
    Element* output;
    std::int64_t output_stride;

    ScanRows from(std::int64_t token) const {
        return {inputs + token * stride, stride, output + token * output_stride, output_stride};
    }

    // Rows lie too far apart for the processor to guess.
    void fetch(int count, int num_columns) const {
        for (int i = 0; i < count; ++i) {
            for (int column = 0; column < num_columns; column += kLineBytes / sizeof(Element)) {
                __builtin_prefetch(inputs + i * stride + column);
                __builtin_prefetch(output + i * output_stride + column, 1);
            }
        }
    }
};

// All loops over registers are unrolled early: else the compiler keeps some in memory.
template <class Element, int kCount, int kVectors>
HEADRACE_TARGET void scan_tokens(const Block& block, std::int64_t state_dim, const ScanTokens& tokens,
                                 const ScanFactors& factors, float skip, const ScanRows<Element>& rows) {
    Vector found[kCount][kVectors], written[kCount][kVectors], state[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            found[i][v] = zero();
            written[i][v] = multiply(load(rows.inputs + i * rows.stride + v * kLanes), set(factors.written[i]));
        }
    }
    const Vector kept = set(factors.kept[kCount - 1]);
    const float* source = block.source;
    float* target = block.target;
    const std::int64_t source_stride = block.source_stride, target_stride = block.target_stride;
    for (std::int64_t row = 0; row < state_dim; ++row, source += source_stride, target += target_stride) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            state[v] = load(source + v * kLanes);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kCount; ++i) {
            const Vector out_of = set(tokens.rows[kScanTokens + i][row]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                found[i][v] = multiply_add(out_of, state[v], found[i][v]);
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            state[v] = multiply(state[v], kept);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kCount; ++i) {
            const Vector into = set(tokens.rows[i][row]);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                state[v] = multiply_add(into, written[i][v], state[v]);
            }
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            store(target + v * kLanes, state[v]);
        }
    }
    for (int i = 0; i < kCount; ++i) {
        for (int v = 0; v < kVectors; ++v) {
            const Element* inputs = rows.inputs + v * kLanes;
            Vector sum = multiply(found[i][v], set(factors.kept[i]));
            sum = multiply_add(load(inputs + i * rows.stride), set(skip), sum);
            for (int j = 0; j <= i; ++j) {
                sum = multiply_add(load(inputs + j * rows.stride), set(factors.weights[i][j]), sum);
            }
            store(rows.output + i * rows.output_stride + v * kLanes, sum);
        }
    }
}

template <class Element>
using ScanFew = void (*)(const Block&, std::int64_t, const ScanTokens&, const ScanFactors&, float,
                         const ScanRows<Element>&);

// By the number of tokens.
template <class Element, int kVectors>
constexpr ScanFew<Element> kScanFew[kScanTokens + 1] = {
    nullptr, scan_tokens<Element, 1, kVectors>, scan_tokens<Element, 2, kVectors>, scan_tokens<Element, 3, kVectors>,
    scan_tokens<Element, 4, kVectors>};

// A chunk of a sequence's tokens, from `token` on, ready for use.
struct ScanChunk {
    std::int64_t token;
    int num_groups;
    ScanTokens groups[kScanChunk / kScanTokens];
    ScanFactors factors[kScanChunk / kScanTokens];

    static ScanChunk& of_this_thread() {
        thread_local std::vector<ScanChunk> chunk(1);
        return chunk[0];
    }
};

// Some columns through a chunk; between its tokens they are in a copy of their own.
template <class Element, int kVectors>
HEADRACE_TARGET void scan_columns(const Block& block, std::int64_t state_dim, const ScanChunk& chunk, float skip,
                                  const ScanRows<Element>& rows) {
    alignas(64) float copy[kMaxStateDim * kVectors * kLanes];
    constexpr std::int64_t kStride = kVectors * kLanes;
    Block now = block;
    for (int g = 0; g < chunk.num_groups; ++g) {
        const bool is_last = g == chunk.num_groups - 1;
        now.target = is_last ? block.target : copy;
        now.target_stride = is_last ? block.target_stride : kStride;
        const ScanRows<Element> own = rows.from(g * kScanTokens);
        if (!is_last) {
            rows.from((g + 1) * kScanTokens).fetch(chunk.groups[g + 1].count, kStride);
        }
        const int count = chunk.groups[g].count;
        kScanFew<Element, kVectors>[count](now, state_dim, chunk.groups[g], chunk.factors[g], skip, own);
        now.source = copy;
        now.source_stride = kStride;
    }
}

// One head through a chunk. source, target: its state.
template <class Element>
HEADRACE_TARGET void scan_head(const ScanCall& call, std::int64_t head, const ScanChunk& chunk, const float* source,
                               float* target) {
    const std::int64_t output_stride = call.num_heads * call.head_dim;
    const Element* inputs = static_cast<const Element*>(call.mixed) + chunk.token * call.mixed_stride;
    Element* output = static_cast<Element*>(call.output) + chunk.token * output_stride + head * call.head_dim;
    const bool is_lone = chunk.num_groups == 1 && chunk.groups[0].count == 1;
    for (std::int64_t column = 0; column < call.head_dim;) {
        const std::int64_t left = (call.head_dim - column) / kLanes;
        const Block block = {source + column, call.head_dim, target + column, call.head_dim};
        const ScanRows<Element> rows = {inputs + head * call.head_dim + column, call.mixed_stride, output + column,
                                        output_stride};
        if (is_lone && left >= kScanVectors) {
            scan_tokens<Element, 1, kScanVectors>(block, call.state_dim, chunk.groups[0], chunk.factors[0],
                                                  call.skip[head], rows);
            column += kScanVectors * kLanes;
        } else if (left >= kVectors) {
            scan_columns<Element, kVectors>(block, call.state_dim, chunk, call.skip[head], rows);
            column += kVectors * kLanes;
        } else {
            scan_columns<Element, 1>(block, call.state_dim, chunk, call.skip[head], rows);
            column += kLanes;
        }
    }
}

// Makes the next tokens ready, from `chunk.token` to before `end_token`, as many as a chunk has.
template <class Element>
HEADRACE_TARGET void fill(const ScanCall& call, std::int64_t group, std::int64_t end_token, ScanChunk& chunk) {
    const int num_tokens = static_cast<int>(std::min<std::int64_t>(kScanChunk, end_token - chunk.token));
    const Element* into = static_cast<const Element*>(call.mixed) + chunk.token * call.mixed_stride;
    into += call.num_heads * call.head_dim + group * call.state_dim;
    const Element* out_of = into + call.num_groups * call.state_dim;
    chunk.num_groups = (num_tokens + kScanTokens - 1) / kScanTokens;
    for (int g = 0; g < chunk.num_groups; ++g) {
        ScanTokens& tokens = chunk.groups[g];
        tokens.count = std::min(kScanTokens, num_tokens - g * kScanTokens);
        for (int i = 0; i < tokens.count; ++i) {
            const std::int64_t place = (g * kScanTokens + i) * call.mixed_stride;
            for (std::int64_t k = 0; k < call.state_dim; k += kLanes) {
                store(tokens.rows[i] + k, load(into + place + k));
                store(tokens.rows[kScanTokens + i] + k, load(out_of + place + k));
            }
            for (int j = 0; j <= i; ++j) {
                tokens.products[i][j] = dot(tokens.rows[kScanTokens + i], tokens.rows[j], call.state_dim);
            }
        }
    }
}

// A part of one group's heads, for all tokens of a sequence.
template <class Element>
HEADRACE_TARGET void run_scan_part(const ScanCall& call, const ScanParts& parts, std::int64_t piece) {
    const std::int64_t part = piece % parts.count, group = piece / parts.count % call.num_groups;
    const std::int64_t sequence = piece / parts.count / call.num_groups;
    const std::int64_t begin = group * parts.heads + parts.first_head(part);
    const std::int64_t end = group * parts.heads + parts.first_head(part + 1);
    const std::int64_t end_token = call.slots.starts[sequence + 1], state_size = call.state_dim * call.head_dim;
    const float* source = call.states + call.slots.read[sequence] * call.slot_stride;
    float* const target = call.states + call.slots.write[sequence] * call.slot_stride;
    ScanChunk& chunk = ScanChunk::of_this_thread();
    for (chunk.token = call.slots.starts[sequence]; chunk.token < end_token;
         chunk.token += kScanChunk, source = target) {
        fill<Element>(call, group, end_token, chunk);
        for (std::int64_t head = begin; head < end; ++head) {
            find_scan_factors<Element>(call, head, chunk.token, chunk.groups, chunk.num_groups, chunk.factors);
            scan_head<Element>(call, head, chunk, source + head * state_size, target + head * state_size);
        }
    }
}

template <class Element>
void run_scan(const ScanCall& call) {
    const ScanParts parts(call);
    pieces::share(call.slots.num_sequences * call.num_groups * parts.count, parts.is_worth_threads,
                  [&](std::int64_t piece) { run_scan_part<Element>(call, parts, piece); });
}
