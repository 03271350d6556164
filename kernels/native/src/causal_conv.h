// Short convolutions, for one instruction set: included as gated_delta_rule.h is.

// Channels that a thread takes together: many, so that it has some of a row before it is at the next one, which is far
// away; fewer where there are many threads.
constexpr std::int64_t kConvChannels = 512, kLeastConvChannels = 128;
constexpr std::int64_t kConvTokens = 16;
constexpr int kMaxWidth = 8;

// Some channels of a sequence: the rows of its inputs and outputs, and where its state is.
template <class Element>
struct Inputs {
    const Element* x;
    std::int64_t stride, length;
    const Element* read;
    Element* write;
    std::int64_t num_channels;
    std::int64_t width;
    const Element* bias;  // or null
    bool has_silu;

    // Of the token of that index, or from the state of so many tokens before the first.
    const Element* row(std::int64_t index) const {
        return index >= 0 ? x + index * stride : read + (width - 1 + index) * num_channels;
    }

    // Where both states are one, rows are read before they are written.
    void keep_latest(std::int64_t count) const {
        for (std::int64_t i = 0; i + 1 < width; ++i) {
            std::memmove(write + i * num_channels, row(length - width + 1 + i), count * sizeof(Element));
        }
    }
};

// taps: [width][kConvChannels]. A few tokens at a time, so that what lies before each is in registers.
template <class Element, int kWidth>
HEADRACE_TARGET void convolve(const Inputs<Element>& inputs, const float* taps, std::int64_t count, Element* output) {
    for (std::int64_t first = 0; first < inputs.length; first += kConvTokens) {
        const std::int64_t end = std::min(first + kConvTokens, inputs.length);
        for (std::int64_t c = 0; c < count; c += kLanes) {
            Vector latest[kWidth], tap[kWidth];
            const Vector bias = inputs.bias ? load(inputs.bias + c) : zero();
#pragma GCC unroll 8
            for (int i = 0; i < kWidth; ++i) {
                tap[i] = load(taps + i * kConvChannels + c);
                if (i > 0) {
                    latest[i] = load(inputs.row(first - kWidth + i) + c);
                }
            }
            for (std::int64_t token = first; token < end; ++token) {
#pragma GCC unroll 8
                for (int i = 1; i < kWidth; ++i) {
                    latest[i - 1] = latest[i];
                }
                latest[kWidth - 1] = load(inputs.x + token * inputs.stride + c);
                Vector sum = bias;
#pragma GCC unroll 8
                for (int i = 0; i < kWidth; ++i) {
                    sum = multiply_add(latest[i], tap[i], sum);
                }
                store(output + token * inputs.num_channels + c, inputs.has_silu ? silu<Element>(sum) : sum);
            }
        }
    }
}

// taps[i][c] = weight[c][i] for some channels. What lies side by side, the compiler knows.
template <int kWidth, class Element>
HEADRACE_TARGET void turn_taps(const Element* weight, const ConvCall& call, std::int64_t count, float* taps) {
    if (call.tap_stride == 1 && call.channel_stride == kWidth) {
        for (std::int64_t c = 0; c < count; ++c) {
#pragma GCC unroll 8
            for (int i = 0; i < kWidth; ++i) {
                taps[i * kConvChannels + c] = widened(weight[c * kWidth + i]);
            }
        }
        return;
    }
    for (std::int64_t c = 0; c < count; ++c) {
        for (int i = 0; i < kWidth; ++i) {
            taps[i * kConvChannels + c] = widened(weight[c * call.channel_stride + i * call.tap_stride]);
        }
    }
}

// Some channels of some sequences.
template <class Element, int kWidth>
HEADRACE_TARGET void convolve_part(const ConvCall& call, std::int64_t first_channel, std::int64_t count,
                                   std::int64_t first_sequence, std::int64_t end_sequence) {
    alignas(64) float taps[kWidth * kConvChannels];
    const Element* weight = static_cast<const Element*>(call.weight) + first_channel * call.channel_stride;
    turn_taps<kWidth>(weight, call, count, taps);
    const Element* bias = call.bias ? static_cast<const Element*>(call.bias) + first_channel : nullptr;
    Element* states = static_cast<Element*>(call.states) + first_channel;
    for (std::int64_t i = first_sequence; i < end_sequence; ++i) {
        const std::int64_t token = call.slots.starts[i];
        const Element* x = static_cast<const Element*>(call.x) + token * call.x_stride + first_channel;
        const Inputs<Element> inputs = {x, call.x_stride, call.slots.starts[i + 1] - token,
                                        states + call.slots.read[i] * call.slot_stride,
                                        states + call.slots.write[i] * call.slot_stride, call.num_channels, kWidth,
                                        bias, call.has_silu != 0};
        Element* output = static_cast<Element*>(call.output) + token * call.num_channels + first_channel;
        convolve<Element, kWidth>(inputs, taps, count, output);
        inputs.keep_latest(count);
    }
}

template <class Element>
using ConvolvePart = void (*)(const ConvCall&, std::int64_t, std::int64_t, std::int64_t, std::int64_t);

// By the width.
template <class Element>
constexpr ConvolvePart<Element> kConvolvePart[kMaxWidth + 1] = {
    nullptr, nullptr, convolve_part<Element, 2>, convolve_part<Element, 3>, convolve_part<Element, 4>,
    convolve_part<Element, 5>, convolve_part<Element, 6>, convolve_part<Element, 7>, convolve_part<Element, 8>,
};

template <class Element>
void run_conv(const ConvCall& call) {
    const std::int64_t num_sequences = call.slots.num_sequences;
    const bool is_worth_threads = call.slots.starts[num_sequences] * call.num_channels > kRowsWorthThreads;
    const std::int64_t wanted = is_worth_threads ? kPiecesPerThread * omp_get_max_threads() : 1;
    const std::int64_t size = std::clamp(call.num_channels / wanted / 16 * 16, kLeastConvChannels, kConvChannels);
    const std::int64_t blocks = (call.num_channels + size - 1) / size;
    const std::int64_t parts = std::min((wanted + blocks - 1) / blocks, num_sequences);
    pieces::share(blocks * parts, is_worth_threads, [&](std::int64_t piece) {
        const std::int64_t part = piece % parts, channel = piece / parts * size;
        kConvolvePart<Element>[call.width](call, channel, std::min(size, call.num_channels - channel),
                                           num_sequences * part / parts, num_sequences * (part + 1) / parts);
    });
}
