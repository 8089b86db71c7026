#include "attention.h"

#include <algorithm>
#include <vector>

#include "schedule.h"

namespace liteattention::cpu {
namespace {

// Tensors of batch entry `i` alone.
AttentionParams Entry(const AttentionParams& p, int64_t i) {
    const int64_t size = p.dtype == DType::kFp32 ? 4 : 2;
    const auto at = [&](const void* base, const Strides& s) {
        return static_cast<const char*>(base) + i * s.batch * size;
    };
    AttentionParams entry = p;
    entry.q = at(p.q, p.q_strides);
    entry.k = at(p.k, p.k_strides);
    entry.v = at(p.v, p.v_strides);
    entry.out = const_cast<char*>(at(p.out, p.out_strides));
    if (p.lse) entry.lse = p.lse + i * p.q_heads * p.lse_head;
    return entry;
}

}  // namespace

void Attention(const AttentionParams& p, int64_t batch, const LiteParams* lite, int threads,
               Isa isa) {
    std::vector<AttentionParams> entries;
    Schedule schedule(isa, p.dtype);
    for (int64_t i = 0; i < batch; ++i) {
        entries.push_back(Entry(p, i));
        schedule.AddTiles(entries.back(), false, lite);
    }
    schedule.Finish();
    schedule.Run(entries, lite, std::max(1, threads));
}

}  // namespace liteattention::cpu
