// The norms of layers with states, for one instruction set: included as gated_delta_rule.h is.

// Rounded where `rms_norm` and the product with the gate are operations of their own.
template <class Element>
HEADRACE_TARGET void norm_row(const Element* x, const Element* gate, const Element* weight, std::int64_t size,
                              float eps, Element* output) {
    Vector total = zero();
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const Vector part = load(x + i);
        total = multiply_add(part, part, total);
    }
    const Vector scale = set(1.0f / __builtin_sqrtf(sum_of(total) / static_cast<float>(size) + eps));
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const Vector scaled = rounded<Element>(multiply(load(x + i), scale));
        const Vector normed = rounded<Element>(multiply(scaled, load(weight + i)));
        store(output + i, multiply(normed, silu<Element>(load(gate + i))));
    }
}

template <class Element>
void run_norm(const NormCall& call) {
    const Element *x = static_cast<const Element*>(call.x), *gate = static_cast<const Element*>(call.gate);
    const Element* weight = static_cast<const Element*>(call.weight);
    Element* output = static_cast<Element*>(call.output);
    const std::int64_t row_size = call.num_heads * call.size;
#pragma omp parallel for schedule(static) if (call.num_rows * row_size > kRowsWorthThreads)
    for (std::int64_t row = 0; row < call.num_rows; ++row) {
        for (std::int64_t i = 0; i < row_size; i += call.size) {
            norm_row(x + row * row_size + i, gate + row * call.gate_stride + i, weight, call.size, call.eps,
                     output + row * row_size + i);
        }
    }
}

// Gated first, and rounded once. gated: room for `size` numbers.
template <class Element>
HEADRACE_TARGET void norm_group(const Element* x, const Element* gate, const Element* weight, std::int64_t size,
                                float eps, float* gated, Element* output) {
    Vector total = zero();
    for (std::int64_t i = 0; i < size; i += kLanes) {
        const Vector part = multiply(load(x + i), silu<Element>(load(gate + i)));
        store(gated + i, part);
        total = multiply_add(part, part, total);
    }
    const Vector scale = set(1.0f / __builtin_sqrtf(sum_of(total) / static_cast<float>(size) + eps));
    for (std::int64_t i = 0; i < size; i += kLanes) {
        store(output + i, multiply(multiply(load(gated + i), scale), load(weight + i)));
    }
}

template <class Element>
void run_grouped_norm(const GroupedNormCall& call) {
    const Element *x = static_cast<const Element*>(call.x), *gate = static_cast<const Element*>(call.gate);
    const Element* weight = static_cast<const Element*>(call.weight);
    Element* output = static_cast<Element*>(call.output);
    const std::int64_t row_size = call.num_groups * call.size;
#pragma omp parallel if (call.num_rows * row_size > kRowsWorthThreads)
    {
        std::vector<float> gated(call.size);
#pragma omp for schedule(static)
        for (std::int64_t row = 0; row < call.num_rows; ++row) {
            for (std::int64_t i = 0; i < row_size; i += call.size) {
                norm_group(x + row * row_size + i, gate + row * call.gate_stride + i, weight + i, call.size, call.eps,
                           gated.data(), output + row * row_size + i);
            }
        }
    }
}
