// What Python calls. Handles are pointers; sizes are checked there.
#include <algorithm>

#include "block_network.h"

using namespace tandem;

extern "C" {

void* tandem_matrix(int32_t form, int32_t out, int32_t in, const void* values, const uint16_t* scales, const uint16_t* minima) {
    return new Matrix(static_cast<Form>(form), out, in, values, scales, minima);
}

void tandem_matrix_free(void* matrix) { delete static_cast<Matrix*>(matrix); }

void tandem_matrix_row(const void* matrix, int32_t index, float* to) { static_cast<const Matrix*>(matrix)->row(index, to); }

void* tandem_decoder(const Shape* shape, const LayerWeights* layers, const void* embedding, const void* head,
                     const float* norm, const float* rope, int32_t threads) {
    return new Decoder(*shape, layers, static_cast<const Matrix*>(embedding), static_cast<const Matrix*>(head), norm,
                       rope, threads);
}

void tandem_decoder_free(void* decoder) { delete static_cast<Decoder*>(decoder); }

void tandem_decoder_forward(void* decoder, const Step* step) { static_cast<Decoder*>(decoder)->forward(*step); }

void tandem_decoder_logits(void* decoder, const float* hidden, int32_t rows, float* to) {
    static_cast<Decoder*>(decoder)->logits(hidden, rows, to);
}

void* tandem_blocks(const Shape* shape, const LayerWeights* layers, const void* head, const Selector* selector,
                    const float* norm, const uint16_t* embedding, int32_t mask_token, int32_t threads) {
    return new BlockNetwork(*shape, layers, static_cast<const Matrix*>(head), *selector, norm, embedding, mask_token,
                            threads);
}

void tandem_blocks_free(void* network) { delete static_cast<BlockNetwork*>(network); }

void tandem_blocks_set_rope(void* network, const float* rope) { static_cast<BlockNetwork*>(network)->set_rope(rope); }

void tandem_blocks_write(void* network, const Context* contexts, int32_t count) {
    static_cast<BlockNetwork*>(network)->write(contexts, count);
}

void tandem_blocks_draft(void* network, const Context* contexts, int32_t count, const Best* best, float* logits) {
    static_cast<BlockNetwork*>(network)->draft(contexts, count, *best, logits);
}

void tandem_decoder_seconds(const void* decoder, double* to) {
    const auto& seconds = static_cast<const Decoder*>(decoder)->seconds();
    std::copy(seconds.begin(), seconds.end(), to);
}

}
