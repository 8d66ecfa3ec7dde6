// What Python calls. Handles are pointers; sizes are checked there.
#include <algorithm>

#include "decoder.h"

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

void tandem_decoder_seconds(const void* decoder, double* to) {
    const auto& seconds = static_cast<const Decoder*>(decoder)->seconds();
    std::copy(seconds.begin(), seconds.end(), to);
}

}
