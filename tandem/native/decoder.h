// A dense decoder with grouped-query attention: Llama, Qwen3.
#pragma once

#include <array>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "simd.h"
#include "team.h"

namespace tandem {

struct Shape {
    int32_t layers, hidden, inner, heads, kv_heads, head_dim, vocab;
    float eps;
    int32_t conv_taps, conv_group;  // taps: 0 without convolutions
};

// DFlash2's causal convolutions along a block's slots: side 0 of what enters a sublayer, side 1 of what leaves it. A
// channel's weight of a tap is the base's and, of its group of channels, the one that the slot's normed input gives.
struct Conv {
    const Matrix* kernels;  // hidden -> [2, taps, hidden / group]
    const float* base;      // [2, taps, hidden]
};

struct LayerWeights {
    const Matrix *q, *k, *v, *o, *gate, *up, *down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm and k_norm may be null
    Conv attention_conv, mlp_conv;                          // null without convolutions
};

struct Step {
    int32_t rows;
    const int64_t* token_ids;  // null: hidden holds the rows' embeddings
    const int64_t* positions;
    const int64_t* slots;
    Tables tables;
    uint16_t* const* kv;     // [layers, pools] of bf16 [slots, 2, kv heads, head_dim]
    int32_t pools;
    const int32_t* pool_of;  // per row, the same in a sequence; null where there is one pool
    float* hidden;           // out: [rows, hidden]
    const int32_t* places;   // per row, its place in its block; null where nothing is convolved
    const int32_t* taps;     // layers, any order
    int32_t tap_count;
    uint16_t* tapped;        // out: bf16 [rows, taps, hidden]; may be null
    // Features: RMSNorm(the sum of each tap times its matrix^T), of every row at its slot. All null without them.
    const Matrix* const* projections;  // [taps]
    const float* feature_norm;
    float feature_eps;
    uint16_t* features;  // out: bf16 [slots, out]
};

// Seconds that steps spent, by what they were spent on.
enum Part { kLinears, kAttention, kOther, kHead, kParts };

class Decoder {
  public:
    // Weights are not copied and must outlive the decoder. rope: [positions, 2, head_dim / 2] cos, then sin. embedding
    // may be null where steps bring their own.
    Decoder(const Shape& shape, const LayerWeights* layers, const Matrix* embedding, const Matrix* head,
            const float* norm, const float* rope, int threads);

    void forward(const Step& step);
    // hidden [rows, hidden] as forward left it -> logits [rows, vocab], and what `beside`, if not null, makes of the
    // normed rows.
    void logits(const float* hidden, int rows, float* to, const Matrix* beside = nullptr, float* beside_to = nullptr);
    // Every layer's keys and values of step.hidden, rows that are normed already, into the rows' slots: all of a DFlash
    // network that its context passes. Reads neither token ids nor tables.
    void write_context(const Step& step);
    void set_rope(const float* rope) { rope_ = rope; }
    Team& team() { return team_; }
    const std::array<double, kParts>& seconds() const { return seconds_; }

  private:
    template <class Task>
    void phase(Team::Place& place, Part part, int tasks, Task&& task);
    void product(
        Team::Place& place, Part part, const Matrix& m, const Activations& x, int rows, float* to, bool add);
    void layer(Team::Place& place, int index, const Step& step);
    void normalise(const float* x, const float* weight, int row, float* kept = nullptr);
    bool is_tapped(int layer, const Step& step) const;
    void project(int layer, int first, int end, const Step& step);
    void write_features(int row, const Step& step) const;
    void add_product(Team::Place& place, const Matrix& m, const Activations& x, const Step& step);
    void convolve_input(Team::Place& place, const Conv& conv, const Step& step);
    void convolve_output(const Conv& conv, int row, const Step& step) const;
    Floats convolved(const Conv& conv, int side, const float* x, int row, int place, int channel) const;
    float* kept(int row) { return shape_.conv_taps ? &entering_[(size_t)row * shape_.hidden] : nullptr; }
    void rotate(int row, int index, const Step& step);
    void turn(const float* from, const float* weight, int64_t position, uint16_t* to) const;
    int tasks_of(int pairs) const;

    Shape shape_;
    HeadShape heads_;
    std::vector<LayerWeights> layers_;
    const Matrix *embedding_, *head_;
    const float *norm_, *rope_;
    Team team_;
    AttentionPlan plan_;
    Activations normed_, attended_, inner_, tapped_;
    std::vector<float> qkv_;                 // [rows, (heads + 2 kv heads) * dim]
    std::vector<uint16_t> q_;                // [rows, heads * dim]
    std::vector<float> entering_, leaving_;  // what is convolved: [rows, hidden]
    std::vector<float> kernels_;             // [rows, 2, taps, hidden / group]
    std::vector<float> projected_;           // [rows, out], on their way to features
    int first_tap_ = -1, last_tap_ = -1;     // of the step's tapped layers, where it makes features
    std::array<double, kParts> seconds_{};
    double phase_end_ = 0;
};

}  // namespace tandem
