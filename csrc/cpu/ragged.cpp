#include "ragged.h"

#include <algorithm>

namespace liteattention::cpu {
namespace {

const char* Offset(const void* base, int64_t elements, int64_t size) {
    return static_cast<const char*>(base) + elements * size;
}

}  // namespace

bool LengthsHold(const PagedRequests& r, int64_t max_q_len, int64_t max_kv_len) {
    if (r.q_start[0] < 0) return false;
    for (int64_t i = 0; i < r.requests; ++i) {
        const int64_t rows = int64_t{r.q_start[i + 1]} - r.q_start[i];
        if (rows < 0 || r.kv_len[i] < 0) return false;
        if (max_q_len >= 0 && rows > max_q_len) return false;
        if (max_kv_len >= 0 && r.kv_len[i] > max_kv_len) return false;
    }
    return true;
}

bool PagesHold(const PagedRequests& r, int64_t rows, int64_t pages, int64_t page_size) {
    if (r.q_start[r.requests] > rows) return false;
    for (int64_t i = 0; i < r.requests; ++i) {
        if (r.q_start[i + 1] == r.q_start[i]) continue;
        const int64_t used = (r.kv_len[i] + page_size - 1) / page_size;
        if (used > r.width) return false;
        const int32_t* row = r.table + i * r.stride;
        // As unsigned numbers negative pages are too large as well.
        uint32_t most = 0;
        for (int64_t j = 0; j < used; ++j) most = std::max(most, static_cast<uint32_t>(row[j]));
        if (used && most >= static_cast<uint64_t>(pages)) return false;
    }
    return true;
}

SeenBatch::SeenBatch(const PagedRequests& r)
    : q_start_(r.q_start, r.q_start + r.requests + 1),
      kv_len_(r.kv_len, r.kv_len + r.requests),
      width_(r.width),
      stride_(r.stride) {}

bool SeenBatch::SameLengths(const int32_t* q_start, const int32_t* kv_len) const {
    return std::equal(q_start_.begin(), q_start_.end(), q_start) &&
           std::equal(kv_len_.begin(), kv_len_.end(), kv_len);
}

bool SeenBatch::Holds(const int32_t* q_start, const int32_t* kv_len, const int32_t* table,
                      int64_t rows, int64_t pages, int64_t page_size) const {
    if (!SameLengths(q_start, kv_len)) return false;
    const PagedRequests r{static_cast<int64_t>(kv_len_.size()),
                          q_start_.data(),
                          kv_len_.data(),
                          table,
                          width_,
                          stride_};
    return PagesHold(r, rows, pages, page_size);
}

RaggedPlan::RaggedPlan(const RaggedShape& shape, const int32_t* q_start, const int32_t* kv,
                       const int32_t* page_table, int64_t table_stride, Isa isa)
    : shape_(shape), schedule_(isa, shape.dtype) {
    const bool paged = shape.page_size > 0;
    const int64_t group = shape.q_heads / shape.kv_heads;
    requests_.reserve(static_cast<size_t>(shape.requests));
    for (int64_t i = 0; i < shape.requests; ++i) {
        Request r{};
        AttentionParams& p = r.params;
        p.q_heads = shape.q_heads;
        p.kv_heads = shape.kv_heads;
        p.q_len = q_start[i + 1] - q_start[i];
        p.kv_len = paged ? kv[i] : kv[i + 1] - kv[i];
        p.head_dim = shape.head_dim;
        p.value_dim = shape.value_dim;
        p.dtype = shape.dtype;
        p.kv_type = shape.kv_type;
        p.rounding = shape.rounding;
        p.scale = shape.scale;
        p.v_scale = shape.v_scale;
        p.soft_cap = shape.soft_cap;
        p.lookahead = shape.lookahead;
        p.window = shape.window;
        p.page_size = shape.page_size;
        p.pages = paged ? page_table + i * table_stride : nullptr;
        r.q_start = q_start[i];
        r.kv_start = paged ? 0 : kv[i];
        if (p.q_len <= 0) continue;
        requests_.push_back(r);
        const bool few = p.q_len == 1 || p.q_len * group <= kMaxDecodeLanes;
        if (few && p.value_dim == p.head_dim)
            schedule_.AddDecode(p);
        else
            schedule_.AddTiles(p, true);
    }
    schedule_.Finish();
}

void RaggedPlan::Run(const RaggedTensors& t, int threads) const {
    const int64_t size = shape_.dtype == DType::kFp32 ? 4 : 2;
    const int64_t kv_size = shape_.kv_type == KvType::kSame ? size : 1;
    std::vector<AttentionParams> params;
    params.reserve(requests_.size());
    for (const Request& r : requests_) {
        AttentionParams p = r.params;
        p.q = Offset(t.q, r.q_start * t.q_strides.seq, size);
        p.out = const_cast<char*>(Offset(t.out, r.q_start * t.out_strides.seq, size));
        p.k = Offset(t.k, r.kv_start * t.k_strides.seq, kv_size);
        p.v = Offset(t.v, r.kv_start * t.v_strides.seq, kv_size);
        p.lse = t.lse ? t.lse + r.q_start : nullptr;
        p.lse_head = t.lse_head;
        p.sinks = t.sinks;
        p.q_strides = t.q_strides;
        p.k_strides = t.k_strides;
        p.v_strides = t.v_strides;
        p.out_strides = t.out_strides;
        params.push_back(p);
    }
    schedule_.Run(params, nullptr, threads);
}

}  // namespace liteattention::cpu
