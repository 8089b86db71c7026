// What a caller asks of the CPU attention: raw pointers, element strides and sizes. No torch.
#pragma once

#include <cstdint>

namespace liteattention::cpu {

// Geometry of the CPU kernels: the one place where these numbers stand.
inline constexpr int kKBlock = 64;       // keys in one K block, the unit of skipping
inline constexpr int kRowStep = 16;      // query rows are handled in multiples of this
inline constexpr int kQItem = 128;       // query rows that a thread takes at once, by default
inline constexpr int kMaxQTile = 128;    // query rows that one pass over K serves, at most
                                         // (soft-skip vote groups must fit in one)
inline constexpr int kMaxQBlock = 1024;  // query rows in one q block, at most
inline constexpr int kGroup = 4;         // K blocks that share one softmax rescale
inline constexpr int kMaxHeadDim = 256;

// With a budget, a tile of which any row has a larger share weighs 1 (docs/budget.md).
inline constexpr float kRowGuard = 0.25f;

// Lanes (query rows times heads of one kv head) up to which a request is decoded: keys and values
// are read in place, without a packed copy.
inline constexpr int kDecodeLanes = 16;
inline constexpr int kMaxDecodeLanes = 32;  // two passes over the keys still beat packing them
inline constexpr int kDecodeSplit = 512;    // keys in one part of a decoded request

enum class DType { kBf16, kFp16, kFp32 };
// kSame: that of the queries. The others are fp8; fnuz: without infinity and -0, whose code is NaN.
enum class KvType { kSame, kFp8E4m3, kFp8E5m2, kFp8E4m3Fnuz, kFp8E5m2Fnuz };
inline constexpr int kFp8Types = 4;
enum class Rounding { kRtne, kRtna, kRtz };

// What a form of fp8 is made of.
struct Fp8Form {
    int mantissa_bits, bias;
    bool fnuz;
    float largest;
};
constexpr Fp8Form Fp8FormOf(KvType type) {
    switch (type) {
        case KvType::kFp8E4m3Fnuz:
            return {3, 8, true, 240.0f};
        case KvType::kFp8E5m2Fnuz:
            return {2, 16, true, 57344.0f};
        case KvType::kFp8E5m2:
            return {2, 15, false, 57344.0f};
        default:
            return {3, 7, false, 448.0f};
    }
}

struct Strides {    // in elements; the head dimension is contiguous
    int64_t batch;  // from one entry of a batch, or page of a cache, to the next
    int64_t seq;
    int64_t head;
};

inline constexpr int64_t kSeesAll = -1;  // a lookahead that bounds nothing

// One request, or one entry of a batch of equal ones.
struct AttentionParams {
    const void* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    void* out = nullptr;
    float* lse = nullptr;  // natural log, [q_heads][lse_head]; null: not wanted
    int64_t lse_head = 0;  // elements from head to head
    Strides q_strides{};
    Strides k_strides{};
    Strides v_strides{};
    Strides out_strides{};
    int64_t q_heads = 0;
    int64_t kv_heads = 0;
    int64_t q_len = 0;
    int64_t kv_len = 0;
    int64_t head_dim = 0;
    int64_t value_dim = 0;  // head dim of v and out; decoding needs head_dim
    DType dtype = DType::kBf16;
    Rounding rounding = Rounding::kRtne;
    double scale = 1.0;
    // Query i stands at position i + kv_len - q_len (bottom-right aligned).
    int64_t lookahead = kSeesAll;  // only keys j <= position + lookahead; 0: causal
    int64_t window = 0;            // > 0: only keys j > position - window
    double soft_cap = 0.0;         // c > 0: scores become c * tanh(score / c)
    const float* sinks = nullptr;  // [q_heads], natural units, or null
    KvType kv_type = KvType::kSame;
    double v_scale = 1.0;  // of fp8 values; that of keys is part of `scale`
    // Paged keys and values: key j is token j % page_size of page
    // pages[j / page_size]; strides.batch goes from page to page. Null: not paged.
    const int32_t* pages = nullptr;
    int64_t page_size = 0;

    // Whether a row may see fewer than all keys after its own.
    bool Bounded() const { return lookahead != kSeesAll; }
    // The key after the last one that query i sees, where it is bounded; past kv_len, or below 0.
    int64_t EndOf(int64_t i) const { return i + kv_len - q_len + lookahead + 1; }
};

// The skip side of a LiteAttention step. Bitmaps: uint32 [batch][q_heads][q_blocks][words], bit
// j % 32 of word j / 32 is K block j, set = compute. Masks: uint32 [words] or null. Bits past the
// last K block mean nothing where they are read and are written as 0.
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
    double budget = 0.0;  // share of softmax mass, < 1; > 0: tiles are weighed, not voted on
    // [q_heads], what the weights that a q block of a head drops add up to at most, in place of
    // floor(budget 2^24). Null: that for all heads.
    const int32_t* limits = nullptr;
    // [batch][q_heads][q_blocks][k_blocks], 0 for tiles that are not computed; or null.
    float* mass = nullptr;
};

}  // namespace liteattention::cpu
