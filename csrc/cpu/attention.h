// CPU attention of a batch of equal requests: dense (lite == null) or one LiteAttention step.
#pragma once

#include "isa.h"
#include "params.h"

namespace liteattention::cpu {

// The caller has checked sizes and strides. Thread safe; throws std::bad_alloc only.
// `params` has the tensors of all entries, strides.batch apart; lse is [batch][q_heads][q_len].
void Attention(const AttentionParams& params, int64_t batch, const LiteParams* lite, int threads,
               Isa isa);

}  // namespace liteattention::cpu
