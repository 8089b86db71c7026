// Dense attention: out = softmax(scale Q K^T) V, bf16, D = 64 and 128, any Sq and Skv >= 1.
//
// Road map. One workgroup of 8 waves computes a tile: 384 query rows of one (batch, q head) against
// all K blocks of 64 keys, or against one part of them (params.h). A wave owns 48 rows in three
// MFMA tiles. Per K block it runs
//
//   Qk       S^T = K Q^T        matrix core   K from LDS, Q in registers
//   Softmax  P^T, m, l          vector ALU    P^T stays in registers, in the layout Pv wants
//   Pv       O^T += V^T P^T     matrix core   V from global memory (L1), packed by transpose_v
//
// Schedule. Waves 0-3 are group A, 4-7 group B; wave i and i + 4 share a SIMD. Both groups run the
// same program, B one barrier later, so that one is on the matrix core while the other is on the
// vector ALU. A line is one stretch between two barriers:
//
//   A  Qk[0]          Softmax[0]        Pv[0] Qk[1]       Softmax[1]        Pv[1] Qk[2]
//   B  -              Qk[0]             Softmax[0]        Pv[0] Qk[1]       Softmax[1]
//                                       copy K[2]                           copy K[3]
//
// K[n] lies in half n % 2 of the LDS. Its readers are Qk[n] of A and, one stretch later, of B; in
// the stretch after that B, then in Softmax[n], starts copying K[n + 2] over it. B waits for that
// copy in its next stretch (Pv[n] Qk[n + 1]), a barrier before A's Qk[n + 2]. The wait at its end
// states the rule and costs nothing: loads retire in order, so the fragments of V that Pv asks for
// behind the copy have waited for it already. The copy thus has one stretch, ~3000 clocks, to land.
// The copies of K[0] and K[1] precede all this, behind a barrier.
//
// The matrix core must not wait at the seams: Pv's first V fragments are asked for at the start of
// Softmax, where A, who comes to a V block first, also touches all of it, so that it lies in L1;
// Qk's first K fragments two fragments before Pv ends.
//
// Budget at D = 128, of 256 registers per lane (two waves a SIMD): outputs 96, queries 48, scores
// 48 or, after them, probabilities 24, fragments 16 + 12; the rest is addresses. All three q tiles
// stay in registers: with the phases fenced and the last K block outside the loop nothing spills.
// LDS: 2 x 16 KiB of K.

#include "load_k.h"
#include "params.h"
#include "pv.h"
#include "qk.h"
#include "softmax.h"
#include "store.h"

namespace liteattention::gfx942 {

// Which rows and which K blocks a workgroup works on. All scalar.
struct Assignment {
    int32_t batch, q_head, q_block;
    int32_t begin, end;  // K blocks
    int32_t slot;        // tail tile * splits + part, or -1 for a whole tile
};

LITE_DEVICE int32_t UniformInt(uint32_t x) { return static_cast<int32_t>(Uniform(x)); }

LITE_DEVICE Assignment Assign(const DenseParams& p, uint32_t id) {
    const int32_t q_blocks = static_cast<int32_t>(QBlocks(p.q_len));
    const int32_t k_blocks = static_cast<int32_t>(KBlocks(p.kv_len));
    const uint32_t whole = static_cast<uint32_t>(p.whole_tiles);
    Assignment a;
    uint32_t tile;
    if (id < whole) {
        tile = XcdContiguous(id, whole);
        a.begin = 0;
        a.end = k_blocks;
        a.slot = -1;
    } else {
        const uint32_t tiles = static_cast<uint32_t>(p.batch * p.q_heads * q_blocks);
        const uint32_t splits = static_cast<uint32_t>(p.splits);
        const uint32_t slot = XcdContiguous(id - whole, (tiles - whole) * splits);
        const int32_t part = static_cast<int32_t>(slot % splits);
        tile = whole + slot / splits;
        a.begin = PartBegin(part, p.splits, k_blocks);
        a.end = PartBegin(part + 1, p.splits, k_blocks);
        a.slot = static_cast<int32_t>(slot);
    }
    // Divisions run on the vector ALU: back to scalars.
    const uint32_t q_index = tile / static_cast<uint32_t>(q_blocks);
    a.q_block = UniformInt(tile % static_cast<uint32_t>(q_blocks));
    a.q_head = UniformInt(q_index % static_cast<uint32_t>(p.q_heads));
    a.batch = UniformInt(q_index / static_cast<uint32_t>(p.q_heads));
    a.begin = UniformInt(static_cast<uint32_t>(a.begin));
    a.end = UniformInt(static_cast<uint32_t>(a.end));
    a.slot = UniformInt(static_cast<uint32_t>(a.slot));
    return a;
}

LITE_DEVICE const char* At(const uint16_t* base, const Strides& s, int64_t batch, int64_t row,
                           int64_t head) {
    return reinterpret_cast<const char*>(base + batch * s.batch + row * s.seq + head * s.head);
}

template <int kDim, Rounding kMode>
LITE_DEVICE void AttentionDense(const DenseParams& p) {
    constexpr int kKBytes = kKBlock * kDim * 2;
    static_assert(2 * kKBytes <= kLdsBytes);
    __shared__ __attribute__((aligned(16))) char k_lds[2 * kKBytes];

    const uint32_t lane = ThreadId() % kWaveSize, wave = Uniform(ThreadId() / kWaveSize);
    const bool group_b = wave >= kWaves / 2;
    const uint32_t quarter = wave % (kWaves / 2);
    const uint32_t across = (lane ^ 32u) * 4u;

    const Assignment a = Assign(p, WorkgroupId());
    const int32_t kv_head = UniformInt(static_cast<uint32_t>(a.q_head / (p.q_heads / p.kv_heads)));
    const int32_t first_row = a.q_block * kQBlock + static_cast<int32_t>(wave) * kWaveRows;
    const KSource keys{At(p.k, p.k_strides, a.batch, 0, kv_head),
                       static_cast<uint32_t>(p.k_strides.seq * 2), p.kv_len};
    const KCopier<kDim> copier(lane, quarter);

    // K[begin] by group A, K[begin + 1] by group B.
    if (a.begin + group_b < a.end)
        LoadK(keys, copier, a.begin + group_b, quarter, k_lds + group_b * kKBytes);

    Queries<kDim> queries;
    LoadQueries(At(p.q, p.q_strides, a.batch, 0, a.q_head), p.q_strides.seq * 2, first_row, p.q_len,
                p.scale_log2, lane, queries);
    const float c = p.scale_log2 == 0.0f ? 1.0f : __builtin_fabsf(p.scale_log2);

    const int32_t k_blocks = static_cast<int32_t>(KBlocks(p.kv_len));
    const char* v_t =
        reinterpret_cast<const char*>(p.v_t) +
        ((static_cast<int64_t>(a.batch) * p.kv_heads + kv_head) * k_blocks + a.begin) * kKBytes;
    const uint32_t k_read = static_cast<uint32_t>(KReadByte(kDim, 0, 0, static_cast<int>(lane)));

    Outputs<kDim> out{};
    Statistics stats;
    for (int x = 0; x < kQTiles; ++x) {
        stats.max[x] = FromBits(kMinusInfinity);
        stats.sum[x] = 0.0f;
    }
    Scores scores;
    Probabilities probs;
    KRing k_ring;
    VRing v_ring;

    WaitLoads();
    Barrier();
    if (group_b) Barrier();  // half a K block behind from here on

    StartQk<kDim>(k_lds, k_read, k_ring);
    Qk(k_lds, k_read, queries, k_ring, scores);
    Barrier();
    uint32_t half = 0;  // of the LDS, holding K[n]
    for (int32_t n = a.begin; n + 1 < a.end; ++n) {
        StartPv<kDim>(v_t, lane, v_ring);
        const uint32_t touched = TouchV<kDim>(v_t, lane, quarter, !group_b);
        if (group_b && n + 2 < a.end) LoadK(keys, copier, n + 2, quarter, k_lds + half);
        Softmax(scores, c, across, stats, out, probs);
        Barrier();

        half ^= kKBytes;
        Priority<1>();
        Pv(v_t, lane, probs, v_ring, out, [&] { StartQk<kDim>(k_lds + half, k_read, k_ring); });
        Discard(touched);
        v_t += kKBytes;
        Qk(k_lds + half, k_read, queries, k_ring, scores);
        Priority<0>();
        WaitLoads();
        Barrier();
    }
    StartPv<kDim>(v_t, lane, v_ring);
    const int32_t valid = p.kv_len - (a.end - 1) * kKBlock;
    if (valid < kKBlock) MaskKeys(valid, lane, scores);
    Softmax(scores, c, across, stats, out, probs);
    Pv(v_t, lane, probs, v_ring, out, [] {});
    if (!group_b) Barrier();  // as many barriers as group B

    if (a.slot < 0) {
        char* rows = const_cast<char*>(At(p.out, p.out_strides, a.batch, first_row, a.q_head));
        const int64_t lse_row =
            (static_cast<int64_t>(a.batch) * p.q_heads + a.q_head) * p.q_len + first_row;
        StoreResult<kDim, kMode>(rows, p.out_strides.seq * 2, p.lse ? p.lse + lse_row : nullptr,
                                 p.q_len - first_row, c, lane, across, stats, out);
    } else {
        const int64_t row = static_cast<int64_t>(a.slot) * kQBlock + wave * kWaveRows;
        float* part_stats = p.part_stats + static_cast<int64_t>(a.slot) * 2 * kQBlock;
        StorePart<kDim>(p.part_out + row * kDim, part_stats + wave * kWaveRows, c, lane, across,
                        stats, out);
    }
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

// The supported variants, all of them.
LITE_KERNEL(kDenseThreads, 2) attention_dense_bf16_d128_rtne(const DenseParams p) {
    AttentionDense<128, Rounding::kRtne>(p);
}
LITE_KERNEL(kDenseThreads, 2) attention_dense_bf16_d128_rtna(const DenseParams p) {
    AttentionDense<128, Rounding::kRtna>(p);
}
LITE_KERNEL(kDenseThreads, 2) attention_dense_bf16_d128_rtz(const DenseParams p) {
    AttentionDense<128, Rounding::kRtz>(p);
}
LITE_KERNEL(kDenseThreads, 2) attention_dense_bf16_d64_rtne(const DenseParams p) {
    AttentionDense<64, Rounding::kRtne>(p);
}
LITE_KERNEL(kDenseThreads, 2) attention_dense_bf16_d64_rtna(const DenseParams p) {
    AttentionDense<64, Rounding::kRtna>(p);
}
LITE_KERNEL(kDenseThreads, 2) attention_dense_bf16_d64_rtz(const DenseParams p) {
    AttentionDense<64, Rounding::kRtz>(p);
}
