#include "decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "simd.h"

namespace tandem {

namespace {

constexpr int kPhasesPerLayer = 8;
constexpr int kTasksPerThread = 8;  // so that a thread that is held up leaves its share to the others

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

int Decoder::tasks_of(int blocks) const { return std::min((blocks + 1) / 2, kTasksPerThread * team_.size()); }

void Decoder::forward(const Step& step) {
    phase_end_ = now();
    const int width = (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim;
    normed_.resize(step.rows, shape_.hidden);
    attended_.resize(step.rows, shape_.heads * shape_.head_dim);
    inner_.resize(step.rows, shape_.inner);
    if (qkv_.size() < (size_t)step.rows * width) {
        qkv_.resize((size_t)step.rows * width);
        q_.resize((size_t)step.rows * shape_.heads * shape_.head_dim);
    }
    plan_.make(step.tables, step.rows, heads_);
    if (plan_.real_rows() < step.rows) {
        std::vector<float> zeros(shape_.heads * shape_.head_dim);
        for (int row = plan_.real_rows(); row < step.rows; row++) attended_.set(row, 0, (int)zeros.size(), zeros.data());
    }
    team_.run(1 + kPhasesPerLayer * shape_.layers, [&](Team::Place& place) {
        phase(place, kOther, step.rows, [&](int row) {
            embedding_->row((int)step.token_ids[row], step.hidden + (size_t)row * shape_.hidden);
            normalise(step.hidden, layers_[0].input_norm, row);
        });
        for (int i = 0; i < shape_.layers; i++) layer(place, i, step);
    });
}

void Decoder::layer(Team::Place& place, int index, const Step& step) {
    const LayerWeights& w = layers_[index];
    const int rows = step.rows, hidden = shape_.hidden, dim = shape_.head_dim;
    const int width = (shape_.heads + 2 * shape_.kv_heads) * dim;
    uint16_t* kv = step.kv[index];

    const Matrix* const qkv[3] = {w.q, w.k, w.v};
    const int qkv_blocks = width / kBlock, qkv_tasks = tasks_of(qkv_blocks);
    phase(place, kLinears, qkv_tasks, [&](int task) {
        int first = (int)((int64_t)qkv_blocks * task / qkv_tasks), end = (int)((int64_t)qkv_blocks * (task + 1) / qkv_tasks);
        int start = 0;
        for (const Matrix* m : qkv) {
            int from = std::max(first, start), to = std::min(end, start + m->blocks());
            if (from < to) multiply(*m, from - start, to - from, normed_, rows, &qkv_[(size_t)from * kBlock], width, false);
            start += m->blocks();
        }
    });
    phase(place, kOther, rows, [&](int row) { rotate(row, w, step, kv); });
    phase(place, kAttention, plan_.tiles() * shape_.kv_heads, [&](int task) {
        plan_.attend(task / shape_.kv_heads, task % shape_.kv_heads, q_.data(), kv, attended_);
    });
    auto added = [&](const Matrix& m, const Activations& x) {
        const int tasks = tasks_of(m.blocks());
        phase(place, kLinears, tasks, [&](int task) {
            int first = (int)((int64_t)m.blocks() * task / tasks), end = (int)((int64_t)m.blocks() * (task + 1) / tasks);
            multiply(m, first, end - first, x, rows, step.hidden + (size_t)first * kBlock, hidden, true);
        });
    };
    added(*w.o, attended_);
    phase(place, kOther, rows, [&](int row) { normalise(step.hidden, w.post_norm, row); });

    // Two blocks of gate and of up make 32 columns of the inner activations.
    const int pairs = shape_.inner / kGroup;
    phase(place, kLinears, pairs, [&](int pair) {
        thread_local std::vector<float> buffer;
        if (buffer.size() < (size_t)rows * 2 * kGroup) buffer.resize((size_t)rows * 2 * kGroup);
        float *gate = buffer.data(), *up = gate + (size_t)rows * kGroup;
        multiply(*w.gate, 2 * pair, 2, normed_, rows, gate, kGroup, false);
        multiply(*w.up, 2 * pair, 2, normed_, rows, up, kGroup, false);
        for (int row = 0; row < rows; row++) {
            float* g = gate + (size_t)row * kGroup;
            for (int i = 0; i < kGroup; i += kLanes)
                store(g + i, silu(load<Floats>(g + i)) * load<Floats>(up + (size_t)row * kGroup + i));
            inner_.set(row, pair * kGroup, kGroup, g);
        }
    });
    added(*w.down, inner_);
    const bool last = index + 1 == shape_.layers;
    phase(place, kOther, rows, [&](int row) {
        const float* x = step.hidden + (size_t)row * hidden;
        for (int t = 0; t < step.tap_count; t++)
            if (step.taps[t] == index)
                for (int i = 0; i < hidden; i += kLanes)
                    store_bf16(step.tapped[t] + (size_t)row * hidden + i, load<Floats>(x + i));
        if (!last) normalise(step.hidden, layers_[index + 1].input_norm, row);
    });
}

void Decoder::logits(const float* hidden, int rows, float* to) {
    phase_end_ = now();
    normed_.resize(rows, shape_.hidden);
    const int tasks = tasks_of(head_->blocks());
    team_.run(2, [&](Team::Place& place) {
        phase(place, kOther, rows, [&](int row) { normalise(hidden, norm_, row); });
        phase(place, kHead, tasks, [&](int task) {
            int first = (int)((int64_t)head_->blocks() * task / tasks);
            int end = (int)((int64_t)head_->blocks() * (task + 1) / tasks);
            multiply(*head_, first, end - first, normed_, rows, to + (size_t)first * kBlock, shape_.vocab, false);
        });
    });
}

void Decoder::normalise(const float* x, const float* weight, int row) {
    thread_local std::vector<float> buffer;
    const int count = shape_.hidden;
    if ((int)buffer.size() < count) buffer.resize(count);
    x += (size_t)row * count;
    float factor = norm_factor(x, count, shape_.eps);
    for (int i = 0; i < count; i += kLanes)
        store(&buffer[i], load<Floats>(x + i) * factor * load<Floats>(weight + i));
    normed_.set(row, 0, count, buffer.data());
}

// q and k of a row normalised and rotated, k and v written to the row's slot.
void Decoder::rotate(int row, const LayerWeights& w, const Step& step, uint16_t* kv) {
    const int dim = shape_.head_dim, half = dim / 2, turning = shape_.heads + shape_.kv_heads;
    const float* from = &qkv_[(size_t)row * (turning + shape_.kv_heads) * dim];
    const float* cosine = rope_ + (size_t)step.positions[row] * dim;
    const float* sine = cosine + half;
    uint16_t* q = &q_[(size_t)row * shape_.heads * dim];
    uint16_t* k = kv + (size_t)step.slots[row] * 2 * shape_.kv_heads * dim;
    thread_local std::vector<float> buffer;
    buffer.resize(dim);
    for (int head = 0; head < turning; head++, from += dim) {
        const float* weight = head < shape_.heads ? w.q_norm : w.k_norm;
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
        uint16_t* to = head < shape_.heads ? q + head * dim : k + (head - shape_.heads) * dim;
        for (int i = 0; i < dim; i += kLanes) store_bf16(to + i, load<Floats>(&buffer[i]));
    }
    uint16_t* v = k + shape_.kv_heads * dim;
    for (int i = 0; i < shape_.kv_heads * dim; i += kLanes) store_bf16(v + i, load<Floats>(from + i));
}

}  // namespace tandem
