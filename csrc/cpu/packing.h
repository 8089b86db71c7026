// Where keys and values lie, and their packed copies that a q tile reads: K blocks as they are in
// memory, zero-padded, V blocks turned.

#include "lane_math.h"

namespace {

constexpr int kStagingWords = kMaxHeadDim;

template <class Gemm, DType kType>
struct Packing {
    static constexpr bool kPairs = Gemm::kPerWord == 2;  // operands are pairs of bf16
    static constexpr int64_t kElement = sizeof(typename Gemm::Element);
    static constexpr int64_t kInput = kType == DType::kFp32 ? 4 : 2;
    static constexpr int kBlockWords = kKBlock / Gemm::kPerWord;  // words of 64 keys

    static int64_t KeyDim(const AttentionParams& p) { return RoundUp(p.head_dim, Gemm::kKPad); }
    static int64_t KeyWords(const AttentionParams& p) { return KeyDim(p) / Gemm::kPerWord; }
    static int64_t ValueRows(const AttentionParams& p) { return RoundUp(p.value_dim, Gemm::kMPad); }

    static size_t KBlockBytes(const AttentionParams& p) {
        return static_cast<size_t>(kKBlock * KeyDim(p) * kElement);
    }
    static size_t VBlockBytes(const AttentionParams& p) {
        return static_cast<size_t>(RoundUp(p.value_dim, 16) * kKBlock * kElement);
    }

    // K blocks are read in place where they lie in one page.
    static bool KDirect(const AttentionParams& p) {
        return kElement == kInput && KeyDim(p) == p.head_dim && p.kv_type == KvType::kSame &&
               (!p.pages || p.page_size % kKBlock == 0);
    }

    static int64_t BlocksOf(const AttentionParams& p) { return (p.kv_len + kKBlock - 1) / kKBlock; }

    static const char* Row(const void* base, const Strides& s, int64_t row, int64_t head) {
        return static_cast<const char*>(base) + (row * s.seq + head * s.head) * kInput;
    }

    static int64_t KvBytes(const AttentionParams& p) {
        return p.kv_type == KvType::kSame ? kInput : 1;
    }

    // Key or value row of a kv head, wherever its page is.
    static const char* KvRow(const AttentionParams& p, const void* base, const Strides& s,
                             int64_t key, int64_t head) {
        int64_t page = 0;
        if (p.pages) {
            page = p.pages[key / p.page_size];
            key %= p.page_size;
        }
        return static_cast<const char*>(base) +
               (page * s.batch + key * s.seq + head * s.head) * KvBytes(p);
    }

    // A key or value row of `dims` in the kernel's own element type.
    static void CopyKvRow(const AttentionParams& p, const char* from, int64_t dims, char* to) {
        if (p.kv_type == KvType::kSame) return CopyRow(from, dims, to);
        const float* table = Fp8Table(p.kv_type);
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
        for (int64_t d = 0; d < dims; ++d) {
            if constexpr (kPairs) {
                uint32_t bits;
                std::memcpy(&bits, table + bytes[d], sizeof bits);
                reinterpret_cast<uint16_t*>(to)[d] = static_cast<uint16_t>(bits >> 16);
            } else {
                reinterpret_cast<float*>(to)[d] = table[bytes[d]];
            }
        }
    }

    static void CopyRow(const char* from, int64_t n, char* to) {
        if constexpr (kPairs)
            std::memcpy(to, from, static_cast<size_t>(n) * 2);
        else
            LoadFloats<kType>(from, n, reinterpret_cast<float*>(to));
    }

    static void PackK(const AttentionParams& p, int64_t kv_head, int64_t block, char* dst) {
        const int64_t row_bytes = KeyDim(p) * kElement;
        const int64_t keys = Min(kKBlock, p.kv_len - block * kKBlock);
        std::memset(dst, 0, KBlockBytes(p));
        for (int64_t i = 0; i < keys; ++i)
            CopyKvRow(p, KvRow(p, p.k, p.k_strides, block * kKBlock + i, kv_head), p.head_dim,
                      dst + i * row_bytes);
    }

    // Keys before it lie before every row's window.
    static int64_t FirstKey(const AttentionParams& p) {
        return p.window ? p.kv_len - p.q_len - p.window + 1 : 0;
    }

    // V^T block: row = head dim, 64 keys in a row. Keys that no row sees, past the end or before
    // the window, are 0, so that 0 * V is 0 whatever their pages hold.
    static void PackV(const AttentionParams& p, int64_t kv_head, int64_t block, char* dst) {
        alignas(64) uint32_t staging[16 * kStagingWords];
        const int64_t dims = RoundUp(p.value_dim, 16);
        const int64_t first = FirstKey(p);
        uint32_t* to = reinterpret_cast<uint32_t*>(dst);
        for (int64_t word = 0; word < kBlockWords; word += 16) {
            for (int64_t i = 0; i < 16; ++i) {
                uint32_t* row = staging + i * dims;
                const int64_t key = block * kKBlock + (word + i) * Gemm::kPerWord;
                std::memset(row, 0, static_cast<size_t>(dims) * 4);
                auto seen = [&](int64_t k) {
                    return k >= first && k < p.kv_len ? KvRow(p, p.v, p.v_strides, k, kv_head)
                                                      : nullptr;
                };
                if constexpr (kPairs) {
                    alignas(64) uint16_t wide[kMaxHeadDim];
                    for (int half = 0; half < 2; ++half) {
                        const char* found = seen(key + half);
                        if (!found) continue;
                        if (p.kv_type != KvType::kSame) {
                            CopyKvRow(p, found, p.value_dim, reinterpret_cast<char*>(wide));
                            found = reinterpret_cast<const char*>(wide);
                        }
                        const uint16_t* value = reinterpret_cast<const uint16_t*>(found);
                        for (int64_t d = 0; d < p.value_dim; ++d)
                            row[d] |= static_cast<uint32_t>(value[d]) << 16 * half;
                    }
                } else if (const char* found = seen(key)) {
                    CopyKvRow(p, found, p.value_dim, reinterpret_cast<char*>(row));
                }
            }
            for (int64_t d = 0; d < dims; d += 16)
                Transpose16x16(staging + d, dims, to + d * kBlockWords + word, kBlockWords);
        }
    }
};

}  // namespace
