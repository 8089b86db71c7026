// CPU attention, dense (lite == null) or one LiteAttention step.
#pragma once

#include "isa.h"
#include "params.h"

namespace liteattention::cpu {

// The caller has checked sizes and strides. Thread safe; throws std::bad_alloc only.
void Attention(const AttentionParams& params, const LiteParams* lite, Isa isa);

}  // namespace liteattention::cpu
