#include "block_network.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

namespace tandem {

BlockNetwork::BlockNetwork(const Shape& shape, const LayerWeights* layers, const Matrix* head,
                           const Selector& selector, const float* norm, const uint16_t* embedding, int mask_token,
                           int threads)
    : shape_(shape),
      decoder_(shape, layers, nullptr, head, norm, nullptr, threads),
      selector_(selector),
      embedding_(embedding),
      mask_token_(mask_token) {}

void BlockNetwork::place(const Context* contexts, int count) {
    const size_t position = (size_t)2 * shape_.kv_heads * shape_.head_dim;
    kv_.resize((size_t)shape_.layers * count);
    for (int layer = 0; layer < shape_.layers; layer++)
        for (int i = 0; i < count; i++)
            kv_[(size_t)layer * count + i] = contexts[i].kv + layer * contexts[i].capacity * position;
    positions_.clear();
    pool_of_.clear();
}

void BlockNetwork::add_row(int context, int64_t position) {
    positions_.push_back(position);
    pool_of_.push_back(context);
}

void BlockNetwork::write(const Context* contexts, int count) {
    place(contexts, count);
    hidden_.clear();
    for (int i = 0; i < count; i++) {
        const size_t values = (size_t)contexts[i].rows * shape_.hidden, first = hidden_.size();
        hidden_.resize(first + values);
        widen(contexts[i].features, values, hidden_.data() + first);
        for (int row = 0; row < contexts[i].rows; row++) add_row(i, contexts[i].start + row);
    }
    const int64_t* positions = positions_.data();
    decoder_.write_context({(int32_t)positions_.size(), nullptr, positions, positions, {}, kv_.data(), count,
                            pool_of_.data(), hidden_.data(), nullptr, nullptr, 0, nullptr});
}

void BlockNetwork::draft(const Context* contexts, int count, const Best& best, float* logits) {
    const int hidden = shape_.hidden;
    place(contexts, count);
    first_rows_.assign(1, 0);
    prefixes_.clear();
    places_.clear();
    for (int c = 0; c < count; c++) {
        const Context& context = contexts[c];
        for (int slot = 0; slot <= context.rows; slot++) {
            add_row(c, context.start + slot);
            // Keys are written before any row attends, so what a row sees is a prefix: context and block.
            prefixes_.push_back((int32_t)context.start + 1 + context.rows);
            places_.push_back(slot);
        }
        first_rows_.push_back((int32_t)places_.size());
    }
    const int rows = (int)places_.size();
    hidden_.resize((size_t)rows * hidden);
    for (int row = 0; row < rows; row++) {
        const int token = places_[row] ? mask_token_ : contexts[pool_of_[row]].anchor;
        widen(embedding_ + (size_t)token * hidden, hidden, &hidden_[(size_t)row * hidden]);
    }
    // Slots are positions: each sequence has one block, which does not end.
    block_tables_.assign(count, 0);
    Tables tables{first_rows_.data(), prefixes_.data(), nullptr, nullptr, block_tables_.data(),
                  count, 0, 1, std::numeric_limits<int32_t>::max()};
    decoder_.forward({rows, nullptr, positions_.data(), positions_.data(), tables, kv_.data(), count, pool_of_.data(),
                      hidden_.data(), places_.data(), nullptr, 0, nullptr});

    int wanted = 0;
    wanted_.resize((size_t)rows * hidden);
    before_.clear();
    for (int i = 0; i < count; wanted += contexts[i].rows, i++) {
        for (int slot = 0; slot < contexts[i].rows; slot++) before_.push_back(slot ? -1 : contexts[i].anchor);
        std::memcpy(&wanted_[(size_t)wanted * hidden], &hidden_[((size_t)first_rows_[i] + 1) * hidden],
                    (size_t)contexts[i].rows * hidden * sizeof(float));
    }
    if (!logits) {
        if (logits_.size() < (size_t)wanted * shape_.vocab) logits_.resize((size_t)wanted * shape_.vocab);
        logits = logits_.data();
    }
    if (selector_.projection) projected_.resize((size_t)wanted * selector_.projection->out());
    decoder_.logits(wanted_.data(), wanted, logits, selector_.projection, projected_.data());
    decoder_.team().run(2, [&](Team::Place& place) {
        place.share(wanted, [&](int row) { best_of(logits + (size_t)row * shape_.vocab, row, best); });
        if (selector_.projection) place.share(wanted, [&](int row) { select(row, before_[row], best); });
    });
}

void BlockNetwork::best_of(const float* logits, int row, const Best& best) const {
    float* values = best.values + (size_t)row * best.count;
    int32_t* columns = best.columns + (size_t)row * best.count;
    int held = 0;
    float least = -std::numeric_limits<float>::infinity();  // what gets in when all places are taken
    for (int first = 0; first < shape_.vocab; first += kLanes) {
        if (held == best.count && !(largest(load<Floats>(logits + first)) > least)) continue;
        for (int column = first; column < first + kLanes; column++) {
            const float value = logits[column];
            if (held == best.count && !(value > least)) continue;
            int at = held < best.count ? held++ : held - 1;
            for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], columns[at] = columns[at - 1];
            values[at] = value, columns[at] = column;
            least = values[held - 1];
        }
    }
    const Floats most = all(values[0]);
    Floats total = {};
    for (int i = 0; i < shape_.vocab; i += kLanes) total += exp_of_negative(load<Floats>(logits + i) - most);
    best.totals[row] = values[0] + std::log(sum(total));
}

// What stands before: a token, or -1 for the best of the row before.
void BlockNetwork::select(int row, int before, const Best& best) const {
    const int rank = selector_.projection->out(), count = best.count;
    const int32_t* columns = best.columns + (size_t)row * count;
    const float *values = best.values + (size_t)row * count, *projected = &projected_[(size_t)row * rank];
    auto token = [&](int32_t column) { return selector_.tokens ? selector_.tokens[column] : column; };
    thread_local std::vector<float> query;
    query.resize(rank);
    for (int p = 0; p < (before < 0 ? count : 1); p++) {
        const uint16_t* predecessor = selector_.predecessors + (before < 0 ? token(columns[p - count]) : before) * rank;
        for (int i = 0; i < rank; i += kLanes) store(&query[i], load_bf16(predecessor + i) * load<Floats>(projected + i));
        float* scores = best.scores + ((size_t)row * count + p) * count;
        float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
        for (int k = 0; k < count; k++) {
            const uint16_t* successor = selector_.successors + token(columns[k]) * rank;
            Floats products = {};
            for (int i = 0; i < rank; i += kLanes)
                products = fma(load<Floats>(&query[i]), load_bf16(successor + i), products);
            scores[k] = values[k] + sum(products);
            most = std::max(most, scores[k]);
        }
        for (int k = 0; k < count; k++) total += std::exp(scores[k] - most);
        const float log_total = most + std::log(total);
        for (int k = 0; k < count; k++) scores[k] -= log_total;
    }
}

}  // namespace tandem
