// Which K blocks a step walks, from a row of the read bitmap and the masks.
#pragma once

#include "params.h"

namespace liteattention::cpu {
namespace {  // a copy for each processor that a file is compiled for

// Word `word` of (read | must_do) & ~must_skip; bits past the last of `k_blocks` K blocks are 0.
inline uint32_t KeptWord(const LiteParams& lite, const uint32_t* row, int64_t word,
                         int64_t k_blocks) {
    uint32_t bits = row[word];
    if (lite.must_do) bits |= lite.must_do[word];
    if (lite.must_skip) bits &= ~lite.must_skip[word];
    const int64_t left = k_blocks - word * 32;
    return left < 32 ? bits & ((1u << left) - 1) : bits;
}

}  // namespace
}  // namespace liteattention::cpu
