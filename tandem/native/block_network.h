// The blocks of a DFlash draft network: a decoder whose slots see their sequence's context and each other.
#pragma once

#include <vector>

#include "decoder.h"

namespace tandem {

// Rows of one sequence, and where its keys and values lie.
struct Context {
    uint16_t* kv;      // bf16 [layers, capacity, 2, kv heads, head_dim], by position
    int64_t capacity;
    int64_t start;     // the first row's position
    int32_t rows;      // of features; of a block the slots wanted behind the anchor
    int32_t anchor;    // of a block: the token its first slot holds
    const uint16_t* features;  // to write: bf16 [rows, hidden]
};

// What is wanted of each row's logits.
struct Best {
    int32_t count;
    float* values;     // [rows, count], descending
    int32_t* columns;  // [rows, count], the first of equals first
    float* totals;     // [rows]: log of the sum of exp over all columns
    float* scores;     // [rows, count, count], with a selector: log-probabilities of the row's best behind each of the
                       // row's before it; behind the anchor, in a block's first row, in the first `count`
};

// DFlash2's: what stands before a token changes its logit.
struct Selector {
    const Matrix* projection;                   // hidden -> rank, of normed rows
    const uint16_t *predecessors, *successors;  // bf16 [vocabulary, rank]
    const int64_t* tokens;                      // of the head's columns; null: they are the tokens
};

class BlockNetwork {
  public:
    // As a Decoder's. selector: its projection is null if there is none. embedding: bf16 [vocabulary, hidden]. A rope
    // must be set before anything else.
    BlockNetwork(const Shape& shape, const LayerWeights* layers, const Matrix* head, const Selector& selector,
                 const float* norm, const uint16_t* embedding, int mask_token, int threads);

    void set_rope(const float* rope) { decoder_.set_rope(rope); }
    // Keys and values of the contexts' features.
    void write(const Context* contexts, int count);
    // One block behind each context, over its positions [start, start + rows]: the anchor, then masks in the slots that
    // are wanted. The rows of best and logits are those of all contexts, one after another; logits [rows, head], unless
    // null.
    void draft(const Context* contexts, int count, const Best& best, float* logits);

  private:
    void place(const Context* contexts, int count);
    void add_row(int context, int64_t position);
    void best_of(const float* logits, int row, const Best& best) const;
    void select(int row, int before, const Best& best) const;

    Shape shape_;
    Decoder decoder_;
    Selector selector_;
    const uint16_t* embedding_;
    int mask_token_;
    std::vector<uint16_t*> kv_;  // [layers, contexts]
    std::vector<int64_t> positions_;
    std::vector<int32_t> pool_of_, first_rows_, prefixes_, places_, block_tables_;
    std::vector<int32_t> before_;  // of each wanted slot: the anchor if it is its block's first, or -1
    std::vector<float> hidden_, wanted_, logits_, projected_;
};

}  // namespace tandem
