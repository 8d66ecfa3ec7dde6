// Attention of a step's rows over paged keys and values.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"

namespace tandem {

// What each row may look at: tandem.kernels.step_tables.StepTables, which says what the fields mean.
struct Tables {
    const int32_t* first_rows;
    const int32_t* prefixes;
    const int32_t* tree_starts;
    const int32_t* ancestors;
    const int32_t* block_tables;
    int32_t sequences, words, blocks, block_tokens;
};

struct HeadShape {
    int heads, kv_heads, dim;
    float scale;
    int group() const { return heads / kv_heads; }
};

// A step's rows in tiles of one sequence each, and where the sequences' keys lie.
class AttentionPlan {
  public:
    // threads: that share the tiles.
    void make(const Tables& tables, int rows, const HeadShape& shape, int threads);
    int tiles() const { return (int)tiles_.size(); }
    int first_row(int tile) const { return tiles_[tile].first_row; }
    // Rows from here on belong to no sequence.
    int real_rows() const { return real_rows_; }
    // One tile for one kv head: q is bf16 [rows, heads * dim], kv one layer's pool [slots, 2, kv heads, dim] in bf16.
    // The result goes to columns [kv_head * group * dim, ...) of out. A row takes what it sees in order of positions, in
    // chunks counted from the first, whatever shares its tile.
    void attend(int tile, int kv_head, const uint16_t* q, const uint16_t* kv, Activations& out) const;

  private:
    struct Tile {
        int sequence, first_row, rows;
    };
    // Positions behind the prefix that a row sees, ascending.
    void tail_of(int row, int sequence, std::vector<int32_t>& positions) const;

    Tables tables_;
    HeadShape shape_;
    int real_rows_ = 0;
    std::vector<Tile> tiles_;
    // Per sequence and position, from the sequence's start on; behind its last up to a full span some slot of its own,
    // behind all a few of no meaning, since reading asks for what it needs next.
    std::vector<int32_t> slots_;
    std::vector<size_t> starts_;
};

}  // namespace tandem
