// What a caller asks of the CPU attention: raw pointers, element strides and sizes. No torch.
#pragma once

#include <cstdint>

namespace liteattention::cpu {

// Geometry of the CPU kernels: the one place where these numbers stand.
inline constexpr int kKBlock = 64;       // keys in one K block, the unit of skipping
inline constexpr int kRowStep = 16;      // query rows are handled in multiples of this
inline constexpr int kQTile = 128;       // query rows that one pass over K serves, by default
inline constexpr int kMaxQTile = 128;    // ... at most (soft-skip vote groups must fit in one)
inline constexpr int kMaxQBlock = 1024;  // query rows in one q block, at most
inline constexpr int kGroup = 4;         // K blocks that share one softmax rescale
inline constexpr int kMaxHeadDim = 256;

enum class DType { kBf16, kFp16, kFp32 };
enum class Rounding { kRtne, kRtna, kRtz };

struct Strides {  // in elements; the head dimension is contiguous
    int64_t batch;
    int64_t seq;
    int64_t head;
};

struct AttentionParams {
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    void* out = nullptr;
    float* lse = nullptr;  // natural log, contiguous [batch][q_heads][q_len]; null: not wanted
    Strides q_strides{};
    Strides k_strides{};
    Strides v_strides{};
    Strides out_strides{};
    int64_t batch = 0;
    int64_t q_heads = 0;
    int64_t kv_heads = 0;
    int64_t q_len = 0;
    int64_t kv_len = 0;
    int64_t head_dim = 0;
    DType dtype = DType::kBf16;
    Rounding rounding = Rounding::kRtne;
    double scale = 1.0;
    bool causal = false;  // bottom-right aligned: query i sees keys j <= i + kv_len - q_len
    int threads = 1;
};

// The skip side of a LiteAttention step. Bitmaps: uint32 [batch][q_heads][q_blocks][words], bit
// j % 32 of word j / 32 is K block j, set = compute. Masks: uint32 [words] or null.
struct LiteParams {
    const uint32_t* read = nullptr;
    uint32_t* write = nullptr;
    const uint32_t* must_do = nullptr;
    const uint32_t* must_skip = nullptr;
    int64_t q_block = 128;
    int64_t vote_rows = 32;
    float threshold = 0.0f;  // log2 units, <= 0; -inf keeps every tile
    bool descending = false;
    bool soft_skip = false;
};

}  // namespace liteattention::cpu
