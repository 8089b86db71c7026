// Attention of requests of different lengths, packed or over a paged cache, and writing to caches.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"
#include "params.h"
#include "schedule.h"

namespace liteattention::cpu {

struct RaggedShape {
    int64_t requests = 0;
    int64_t q_heads = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;
    int64_t value_dim = 0;  // of v and out; head_dim if paged
    int64_t page_size = 0;  // 0: keys and values are packed like the queries
    DType dtype = DType::kBf16;
    KvType kv_type = KvType::kSame;
    Rounding rounding = Rounding::kRtne;
    double scale = 1.0;  // that of fp8 keys included
    double v_scale = 1.0;
    double soft_cap = 0.0;  // 0: none
    int64_t lookahead = kSeesAll;
    int64_t window = 0;  // 0: none
};

// Tensors of one call. Strides in elements: `batch` is the step from page to page (unused when
// packed), `seq` from row to row or token to token.
struct RaggedTensors {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    float* lse;          // [q_heads][lse_head] or null
    const float* sinks;  // [q_heads] or null
    Strides q_strides;
    Strides k_strides;
    Strides v_strides;
    Strides out_strides;
    int64_t lse_head;
};

// A batch of requests over a paged cache, as a step's caller hands it over.
struct PagedRequests {
    int64_t requests = 0;
    const int32_t* q_start = nullptr;  // [requests + 1]
    const int32_t* kv_len = nullptr;   // [requests]
    const int32_t* table = nullptr;    // [requests][stride], `width` of them meant
    int64_t width = 0;
    int64_t stride = 0;
};

// Whether starts and lengths are in order and within the bounds; negative bounds are none.
bool LengthsHold(const PagedRequests& r, int64_t max_q_len, int64_t max_kv_len);

// The lengths of a batch when it was checked. Tensors can be refilled in ways that leave no trace
// (NumPy, inference mode), so every call compares them.
class SeenBatch {
   public:
    // `r`: its lengths hold. They are copied; of the table its shape is.
    explicit SeenBatch(const PagedRequests& r);

    // Whether the lengths are still those.
    bool SameLengths(const int32_t* q_start, const int32_t* kv_len) const;

    // Whether they are, and the table names pages of this cache only; see PagesHold.
    bool Holds(const int32_t* q_start, const int32_t* kv_len, const int32_t* table, int64_t rows,
               int64_t pages, int64_t page_size) const;

   private:
    std::vector<int32_t> q_start_, kv_len_;
    int64_t width_, stride_;
};

// Whether the requests, whose lengths hold, end within `rows` query rows and name pages of the
// cache only.
bool PagesHold(const PagedRequests& r, int64_t rows, int64_t pages, int64_t page_size);

// The work of one step, cut and ordered once and run for every layer. Immutable: runs may overlap.
class RaggedPlan {
   public:
    // q_start [requests + 1]; kv: kv_len [requests] when paged, else kv_start [requests + 1]. Both
    // are copied. page_table [requests][table_stride] is not and must outlive the plan.
    RaggedPlan(const RaggedShape& shape, const int32_t* q_start, const int32_t* kv,
               const int32_t* page_table, int64_t table_stride, Isa isa);

    // Thread safe; throws std::bad_alloc only.
    void Run(const RaggedTensors& tensors, int threads) const;

    // Pieces of work: q tiles, and parts of decoded requests.
    size_t tiles() const { return schedule_.tiles(); }
    size_t parts() const { return schedule_.parts(); }

   private:
    struct Request {
        AttentionParams params;  // without addresses and strides
        int64_t q_start;
        int64_t kv_start;
    };

    RaggedShape shape_;
    std::vector<Request> requests_;
    Schedule schedule_;
};

// Rows [rows][kv_heads][head_dim] to be written to slots of a paged cache.
struct KvWrite {
    const void* k = nullptr;
    const void* v = nullptr;
    void* k_cache = nullptr;
    void* v_cache = nullptr;
    const void* slots = nullptr;  // int64 or int32; negative: not written
    bool wide_slots = true;
    int64_t rows = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;
    int64_t pages = 0;
    int64_t page_size = 0;
    Strides k_strides{};  // batch unused
    Strides v_strides{};
    Strides k_cache_strides{};  // page, token, head
    Strides v_cache_strides{};
    DType dtype = DType::kBf16;
    KvType kv_type = KvType::kSame;
    double k_scale = 1.0;
    double v_scale = 1.0;
};

// Returns -1, or the first slot that lies beyond the cache: nothing is written then.
int64_t WriteKv(const KvWrite& write, int threads);

}  // namespace liteattention::cpu
