#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace tandem {

namespace {

constexpr int kPhasesPerLayer = 8, kConvPhases = 4;
constexpr int kTasksPerThread = 8;  // so that a thread that is held up leaves its share to the others

uint16_t* pool(const Step& step, int layer, int row) {
    return step.kv[(size_t)layer * step.pools + (step.pool_of ? step.pool_of[row] : 0)];
}

template <class Value>
void grow(std::vector<Value>& buffer, size_t size) {
    if (buffer.size() < size) buffer.resize(size);
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// 1 / sqrt(mean square + eps)
float norm_factor(const float* x, int count, float eps) {
    Floats squares = {};
    for (int i = 0; i < count; i += kLanes) {
        Floats v = load<Floats>(x + i);
        squares = fma(v, v, squares);
    }
    return 1.0f / std::sqrt(sum(squares) / (float)count + eps);
}

}  // namespace

Decoder::Decoder(const Shape& shape, const LayerWeights* layers, const Matrix* embedding, const Matrix* head,
                 const float* norm, const float* rope, int threads)
    : shape_(shape),
      heads_{shape.heads, shape.kv_heads, shape.head_dim, 1.0f / std::sqrt((float)shape.head_dim)},
      layers_(layers, layers + shape.layers),
      embedding_(embedding),
      head_(head),
      norm_(norm),
      rope_(rope),
      team_(threads) {
    normed_.need(head->form());
    for (const LayerWeights& w : layers_) {
        for (const Matrix* m : {w.q, w.k, w.v, w.gate, w.up}) normed_.need(m->form());
        if (shape.conv_taps) normed_.need(w.attention_conv.kernels->form());
        attended_.need(w.o->form());
        inner_.need(w.down->form());
    }
}

// The tasks of a phase; the caller's thread keeps the time.
template <class Task>
void Decoder::phase(Team::Place& place, Part part, int tasks, Task&& task) {
    place.share(tasks, task);
    if (place.caller()) {
        double end = now();
        seconds_[part] += end - phase_end_;
        phase_end_ = end;
    }
}

int Decoder::tasks_of(int pairs) const { return std::min(pairs, kTasksPerThread * team_.size()); }

// A phase: to = x m^T, or += it; to: [rows, m.out()].
void Decoder::product(
    Team::Place& place, Part part, const Matrix& m, const Activations& x, int rows, float* to, bool add) {
    const int tasks = tasks_of(m.pairs());
    phase(place, part, tasks, [&](int task) {
        int first = (int)((int64_t)m.pairs() * task / tasks), end = (int)((int64_t)m.pairs() * (task + 1) / tasks);
        multiply(m, first, end, x, rows, to + (size_t)first * 2 * kBlock, m.out(), add);
    });
}

void Decoder::forward(const Step& step) {
    phase_end_ = now();
    const int width = (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
    normed_.resize(step.rows, shape_.hidden);
    attended_.resize(step.rows, shape_.heads * shape_.head_dim);
    inner_.resize(step.rows, shape_.inner);
    grow(qkv_, (size_t)step.rows * width);
    grow(q_, (size_t)step.rows * shape_.heads * shape_.head_dim);
    if (shape_.conv_taps) {
        for (auto* buffer : {&entering_, &leaving_}) grow(*buffer, (size_t)step.rows * shape_.hidden);
        grow(kernels_, (size_t)step.rows * layers_[0].attention_conv.kernels->out());
    }
    plan_.make(step.tables, step.rows, heads_, team_.size());
    if (plan_.real_rows() < step.rows) {
        std::vector<float> zeros(shape_.heads * shape_.head_dim);
        for (int row = plan_.real_rows(); row < step.rows; row++) attended_.set(row, 0, (int)zeros.size(), zeros.data());
    }
    last_tap_ = -1;
    if (step.features) {
        for (int t = 0; t < step.tap_count; t++) tapped_.need(step.projections[t]->form());
        tapped_.resize(step.rows, shape_.hidden);
        grow(projected_, (size_t)step.rows * step.projections[0]->out());
        first_tap_ = *std::min_element(step.taps, step.taps + step.tap_count);
        last_tap_ = *std::max_element(step.taps, step.taps + step.tap_count);
    }
    const int phases = kPhasesPerLayer + (shape_.conv_taps ? kConvPhases : 0);
    team_.run(3 + phases * shape_.layers, [&](Team::Place& place) {
        phase(place, kOther, step.rows, [&](int row) {
            if (step.token_ids) embedding_->row((int)step.token_ids[row], step.hidden + (size_t)row * shape_.hidden);
            normalise(step.hidden, layers_[0].input_norm, row, kept(row));
        });
        for (int i = 0; i < shape_.layers; i++) layer(place, i, step);
        if (last_tap_ != shape_.layers - 1) return;
        const int pairs = step.projections[0]->pairs(), tasks = tasks_of(pairs);
        phase(place, kLinears, tasks, [&](int task) {
            project(last_tap_, pairs * task / tasks, pairs * (task + 1) / tasks, step);
        });
        phase(place, kOther, step.rows, [&](int row) { write_features(row, step); });
    });
}

void Decoder::layer(Team::Place& place, int index, const Step& step) {
    const LayerWeights& w = layers_[index];
    const int rows = step.rows, hidden = shape_.hidden, dim = shape_.head_dim;
    const int width = (shape_.heads + 2 * shape_.kv_heads) * dim;
    const bool convs = shape_.conv_taps > 0;

    if (convs) convolve_input(place, w.attention_conv, step);
    const Matrix* const qkv[3] = {w.q, w.k, w.v};
    const int qkv_pairs = w.q->pairs() + w.k->pairs() + w.v->pairs();
    // What the layer before adds to the features is made here: a phase of its own would cost more than its product.
    const int pairs = qkv_pairs + (is_tapped(index - 1, step) ? step.projections[0]->pairs() : 0);
    const int tasks = tasks_of(pairs);
    phase(place, kLinears, tasks, [&](int task) {
        const int begin = pairs * task / tasks, end = pairs * (task + 1) / tasks;
        int start = 0, column = 0;
        for (const Matrix* m : qkv) {
            const int from = std::max(begin - start, 0), to = std::min(end - start, m->pairs());
            if (from < to) multiply(*m, from, to, normed_, rows, &qkv_[column + from * 2 * kBlock], width, false);
            start += m->pairs();
            column += m->out();
        }
        if (end > qkv_pairs) project(index - 1, std::max(begin - qkv_pairs, 0), end - qkv_pairs, step);
    });
    phase(place, kOther, rows, [&](int row) {
        rotate(row, index, step);
        if (index > 0 && index - 1 == last_tap_) write_features(row, step);
    });
    phase(place, kAttention, plan_.tiles() * shape_.kv_heads, [&](int task) {
        const int tile = task / shape_.kv_heads;
        plan_.attend(tile, task % shape_.kv_heads, q_.data(), pool(step, index, plan_.first_row(tile)), attended_);
    });
    add_product(place, *w.o, attended_, step);
    phase(place, kOther, rows, [&](int row) {
        if (convs) convolve_output(w.attention_conv, row, step);
        normalise(step.hidden, w.post_norm, row, kept(row));
    });

    if (convs) convolve_input(place, w.mlp_conv, step);
    // Two blocks of gate and of up make 32 columns of the inner activations.
    phase(place, kLinears, shape_.inner / kGroup, [&](int pair) {
        thread_local std::vector<float> buffer;
        if (buffer.size() < (size_t)rows * 2 * kGroup) buffer.resize((size_t)rows * 2 * kGroup);
        float *gate = buffer.data(), *up = gate + (size_t)rows * kGroup;
        multiply(*w.gate, pair, pair + 1, normed_, rows, gate, kGroup, false);
        multiply(*w.up, pair, pair + 1, normed_, rows, up, kGroup, false);
        for (int row = 0; row < rows; row++) {
            float* g = gate + (size_t)row * kGroup;
            for (int i = 0; i < kGroup; i += kLanes)
                store(g + i, silu(load<Floats>(g + i)) * load<Floats>(up + (size_t)row * kGroup + i));
            inner_.set(row, pair * kGroup, kGroup, g);
        }
    });
    add_product(place, *w.down, inner_, step);
    const bool last = index + 1 == shape_.layers;
    phase(place, kOther, rows, [&](int row) {
        if (convs) convolve_output(w.mlp_conv, row, step);
        const float* x = step.hidden + (size_t)row * hidden;
        for (int t = 0; t < step.tap_count; t++) {
            if (step.taps[t] != index) continue;
            if (step.features) tapped_.set(row, 0, hidden, x);
            if (step.tapped)
                for (int i = 0; i < hidden; i += kLanes)
                    store_bf16(step.tapped + ((size_t)row * step.tap_count + t) * hidden + i, load<Floats>(x + i));
        }
        if (!last) normalise(step.hidden, layers_[index + 1].input_norm, row, kept(row));
    });
}

bool Decoder::is_tapped(int layer, const Step& step) const {
    return step.features && std::find(step.taps, step.taps + step.tap_count, layer) != step.taps + step.tap_count;
}

// The rows in tapped_ times a tapped layer's matrix, of its pairs [first, end), into what is projected so far.
void Decoder::project(int layer, int first, int end, const Step& step) {
    const int out = step.projections[0]->out();
    bool add = layer != first_tap_;
    for (int t = 0; t < step.tap_count; t++) {
        if (step.taps[t] != layer) continue;
        multiply(*step.projections[t], first, end, tapped_, step.rows, &projected_[first * 2 * kBlock], out, add);
        add = true;
    }
}

void Decoder::write_features(int row, const Step& step) const {
    const int out = step.projections[0]->out();
    const float* y = &projected_[(size_t)row * out];
    const float factor = norm_factor(y, out, step.feature_eps);
    uint16_t* to = step.features + (size_t)step.slots[row] * out;
    for (int i = 0; i < out; i += kLanes)
        store_bf16(to + i, load<Floats>(y + i) * factor * load<Floats>(step.feature_norm + i));
}

// A sublayer's last product, into the residual stream, or to where its convolution reads it.
void Decoder::add_product(Team::Place& place, const Matrix& m, const Activations& x, const Step& step) {
    const bool convs = shape_.conv_taps > 0;
    product(place, kLinears, m, x, step.rows, convs ? leaving_.data() : step.hidden, !convs);
}

// The normed rows, in entering_ too, become what enters the sublayer.
void Decoder::convolve_input(Team::Place& place, const Conv& conv, const Step& step) {
    product(place, kLinears, *conv.kernels, normed_, step.rows, kernels_.data(), false);
    phase(place, kOther, step.rows, [&](int row) {
        thread_local std::vector<float> buffer;
        grow(buffer, shape_.hidden);
        for (int i = 0; i < shape_.hidden; i += kLanes)
            store(&buffer[i], convolved(conv, 0, entering_.data(), row, step.places[row], i));
        normed_.set(row, 0, shape_.hidden, buffer.data());
    });
}

void Decoder::convolve_output(const Conv& conv, int row, const Step& step) const {
    float* to = step.hidden + (size_t)row * shape_.hidden;
    for (int i = 0; i < shape_.hidden; i += kLanes)
        store(to + i, load<Floats>(to + i) + convolved(conv, 1, leaving_.data(), row, step.places[row], i));
}

// Sixteen channels, which are of one group.
Floats Decoder::convolved(const Conv& conv, int side, const float* x, int row, int place, int channel) const {
    const int hidden = shape_.hidden, groups = hidden / shape_.conv_group;
    const float* kernels = &kernels_[(size_t)row * conv.kernels->out()];
    Floats y = {};
    for (int tap = 0; tap < shape_.conv_taps && tap <= place; tap++) {
        const int of = side * shape_.conv_taps + tap;
        Floats weight = load<Floats>(conv.base + (size_t)of * hidden + channel) +
                        all(kernels[of * groups + channel / shape_.conv_group]);
        y = fma(weight, load<Floats>(x + (size_t)(row - tap) * hidden + channel), y);
    }
    return y;
}

void Decoder::logits(const float* hidden, int rows, float* to, const Matrix* beside, float* beside_to) {
    phase_end_ = now();
    normed_.resize(rows, shape_.hidden);
    team_.run(3, [&](Team::Place& place) {
        phase(place, kOther, rows, [&](int row) { normalise(hidden, norm_, row); });
        product(place, kHead, *head_, normed_, rows, to, false);
        if (beside) product(place, kHead, *beside, normed_, rows, beside_to, false);
    });
}

// kept: where the normed row is wanted in fp32 as well, or null.
void Decoder::normalise(const float* x, const float* weight, int row, float* kept) {
    thread_local std::vector<float> buffer;
    const int count = shape_.hidden;
    grow(buffer, count);
    if (!kept) kept = buffer.data();
    x += (size_t)row * count;
    float factor = norm_factor(x, count, shape_.eps);
    for (int i = 0; i < count; i += kLanes) store(kept + i, load<Floats>(x + i) * factor * load<Floats>(weight + i));
    normed_.set(row, 0, count, kept);
}

// A head normalised, if there is a weight, and rotated.
void Decoder::turn(const float* from, const float* weight, int64_t position, uint16_t* to) const {
    const int dim = shape_.head_dim, half = dim / 2;
    const float *cosine = rope_ + (size_t)position * dim, *sine = cosine + half;
    thread_local std::vector<float> buffer;
    buffer.resize(dim);
    float factor = weight ? norm_factor(from, dim, shape_.eps) : 1.0f;
    for (int i = 0; i < half; i++) {
        float a = from[i], b = from[i + half];
        if (weight) {
            a = a * factor * weight[i];
            b = b * factor * weight[i + half];
        }
        buffer[i] = a * cosine[i] - b * sine[i];
        buffer[i + half] = b * cosine[i] + a * sine[i];
    }
    for (int i = 0; i < dim; i += kLanes) store_bf16(to + i, load<Floats>(&buffer[i]));
}

// q and k of a row normalised and rotated, k and v written to the row's slot.
void Decoder::rotate(int row, int index, const Step& step) {
    const LayerWeights& w = layers_[index];
    const int dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
    const float* from = &qkv_[(size_t)row * (heads + 2 * kv_heads) * dim];
    uint16_t* q = &q_[(size_t)row * heads * dim];
    uint16_t* k = pool(step, index, row) + (size_t)step.slots[row] * 2 * kv_heads * dim;
    for (int head = 0; head < heads; head++, from += dim) turn(from, w.q_norm, step.positions[row], q + head * dim);
    for (int head = 0; head < kv_heads; head++, from += dim) turn(from, w.k_norm, step.positions[row], k + head * dim);
    uint16_t* v = k + kv_heads * dim;
    for (int i = 0; i < kv_heads * dim; i += kLanes) store_bf16(v + i, load<Floats>(from + i));
}

void Decoder::write_context(const Step& step) {
    const int dim = shape_.head_dim, width = shape_.kv_heads * dim;
    const size_t row_size = (size_t)shape_.layers * 2 * width;
    phase_end_ = now();
    normed_.resize(step.rows, shape_.hidden);
    grow(qkv_, step.rows * row_size);
    team_.run(3, [&](Team::Place& place) {
        phase(place, kOther, step.rows,
              [&](int row) { normed_.set(row, 0, shape_.hidden, step.hidden + (size_t)row * shape_.hidden); });
        phase(place, kLinears, 2 * shape_.layers, [&](int task) {
            const LayerWeights& w = layers_[task / 2];
            const Matrix& m = task % 2 ? *w.v : *w.k;
            multiply(m, 0, m.pairs(), normed_, step.rows, &qkv_[(size_t)task * width], row_size, false);
        });
        phase(place, kOther, step.rows, [&](int row) {
            const float* from = &qkv_[row * row_size];
            for (int i = 0; i < shape_.layers; i++, from += 2 * width) {
                uint16_t* k = pool(step, i, row) + (size_t)step.slots[row] * 2 * width;
                for (int head = 0; head < shape_.kv_heads; head++)
                    turn(from + head * dim, layers_[i].k_norm, step.positions[row], k + head * dim);
                for (int j = 0; j < width; j += kLanes) store_bf16(k + width + j, load<Floats>(from + width + j));
            }
        });
    });
}

}  // namespace tandem
