// The main loop of attention: one tile, 256 query rows of one (batch, q head), over a sequence of K
// blocks. attention_dense.hip, attention_lite.hip and attention_weigh.hip differ in the sequence,
// and in what they learn of it.
//
// Road map. One workgroup of 8 waves computes a tile; a wave owns 32 rows, one MFMA tile. Per K
// block of 64 keys it runs
//
//   Qk       S^T = K Q^T        matrix core   K from LDS, Q in registers
//   Softmax  P^T, m, l          vector ALU    P^T stays in registers, in the layout Pv wants
//   Pv       O^T += V^T P^T     matrix core   V from LDS, packed by transpose_v
//
// Schedule. Waves 0-3 are group A, 4-7 group B; wave i and i + 4 share a SIMD. Both groups run the
// same program, B one barrier later, so that one is on the matrix core while the other is on the
// vector ALU (softmax.h: Exponentials). A line is one stretch between two barriers:
//
//   A  Qk[0]          Softmax[0]        Pv[0] Qk[1]       Softmax[1]        Pv[1] Qk[2]
//                                       copy V[1] K[2]                      copy V[2] K[3]
//   B  -              Qk[0]             Softmax[0]        Pv[0] Qk[1]       Softmax[1]
//                                                         copy V[1]
//
// K[n] and V[n], of the n-th block of the sequence, lie in half n % 2 of their LDS. K[n + 2] goes
// over K[n], which B reads in the stretch before A copies; A waits for it at the end of its next
// stretch and reads it after the barrier there: it has more than a stretch, ~2100 clocks, to land.
// V[n + 1] goes over V[n - 1], which B has read in the stretch before A copies what Pv begins with
// and waits for that alone; B copies the rest in the next stretch, before A begins Pv. All copies
// stand among MFMAs, far apart (Slots): scalar instructions are free there, and the address unit
// has time. The copies of K[0], K[1] and V[0] precede all this.
//
// The matrix core must not wait at the seams: Pv's first V fragments are read as Softmax begins and
// while it waits for maxima, Qk's first K fragments among the last MFMAs of Pv. Nor must an MFMA
// wait for the one before it: they alternate between two accumulators (qk.h: kAbreast).
//
// Budget of a stretch: 64 MFMAs are 2048 clocks. The other group's vector instructions share the
// port with them: 256 clocks of it are theirs, and at D = 128 Softmax takes ~1250.
//
// Registers at D = 128, of 256 per lane (two waves a SIMD): outputs 64, queries 32, scores 32 or,
// after them, probabilities 16, fragments 16 + 16; the rest is addresses and numbers on their way.
// LDS: 2 x 16 KiB of K, 2 x 16 KiB of V: all of it.
//
// A sequence (`Blocks`) lives in scalar registers, the same in all waves, and has
//
//   Has(i)          whether there is a K block i places after the current one, i = 0, 1
//   At(i)           its number
//   Advance<step>() steps on, in kSteps steps
//   kFewScalars     whether it leaves too few scalar registers to make copies' addresses ahead
//   kRaggedLast     whether a K block of fewer than 64 keys can only be the last one
//   Look, Decide    what a wave thinks of the current block once it knows its maxima (softmax.h)
//   LeftOut()       whether the wave leaves the current block out; never unless kLeavesOut
//   kShared         whether two workgroups share a compute unit at D = 64 (softmax.h: PacksFp32)
//   Weigh(...)      optional: takes what the probabilities of the current block add up to
#pragma once

#include "load_k.h"
#include "params.h"
#include "pv.h"
#include "qk.h"
#include "softmax.h"
#include "store.h"

namespace liteattention::gfx942 {

LITE_DEVICE const char* At(const uint16_t* base, const Strides& s, int64_t batch, int64_t row,
                           int64_t head) {
    return reinterpret_cast<const char*>(base + batch * s.batch + row * s.seq + head * s.head);
}

// The rows that a workgroup works on. All scalar.
struct Tile {
    int32_t batch, q_head, q_block;
};

// Who a wave is.
struct WaveId {
    uint32_t lane, wave;
    uint32_t quarter;  // 0..3 within its group
    bool group_b;
    uint32_t across;  // 4 (lane ^ 32)

    // The same, later: what is per lane is computed anew, not held in registers till then.
    LITE_DEVICE WaveId Again() const {
        WaveId me = *this;
        me.lane = LaneHere();
        me.across = (me.lane ^ 32u) * 4u;
        return me;
    }
    LITE_DEVICE uint32_t Thread() const { return wave * kWaveSize + lane; }

    LITE_DEVICE WaveId()
        : lane(ThreadId() % kWaveSize),
          wave(Uniform(ThreadId() / kWaveSize)),
          quarter(wave % (kWaves / 2)),
          group_b(wave >= kWaves / 2),
          across((lane ^ 32u) * 4u) {}
};

using L = Layout32;
inline constexpr int kQTiles = kWaveRows / L::kTile;
using WaveStatistics = Statistics<L, kQTiles>;
using WaveScores = Scores<L, kQTiles, kKBlock>;
template <int kDim>
using WaveOutputs = Outputs<L, kDim, kQTiles>;

template <int kDim>
inline constexpr int kBlockBytes = kKBlock * kDim * 2;  // of a K block, and of one of V_t
// Of LDS: two blocks of K and two of V.
template <int kDim>
inline constexpr int kAttentionLds = 4 * kBlockBytes<kDim>;

// What a wave does beside its MFMAs in the slots of Pv and Qk, counted from Pv's first. A slot
// hides seven instructions of its wave; of each four, the first two read no fragment. A copy to LDS
// is four or five instructions.
template <int kDim>
struct Slots {
    static constexpr int kPv = kPvSlots<L, kDim, kKBlock>;
    static constexpr int kAll = kPv + kQkSlots<L, kDim, kKBlock>;

    static constexpr int kAdvance = 1;  // on to the next K block: Blocks::kSteps
    static constexpr int kBeginV = 8;   // addresses of V of that block
    static constexpr int kV = 12;       // its copies
    static constexpr int kK = 20;       // copies of K of the block behind it

    // The step of K's addresses made in a slot, or -1.
    static constexpr int BeginK(int slot) {
        return slot == 6 || slot == 10 || slot == 14 ? slot / 4 - 1 : -1;
    }
    // Which copy is made in a slot, of those that begin in slot `first`; or -1. The last slots read
    // no fragment.
    static constexpr int Copy(int slot, int first) {
        const int past = slot - first;
        return past >= 0 && (past % 4 < 2 || slot >= kAll - 2) ? past / 4 * 2 + past % 4 : -1;
    }
};

// Computes a tile into `out` and `stats`. `lds` is kAttentionLds bytes of LDS, 16-byte aligned. All
// waves of the workgroup call it and leave it having passed the same number of barriers.
template <class Number, int kDim, class Params, class Blocks>
LITE_DEVICE void Attend(const Params& p, const Tile& tile, const WaveId& me, char* lds,
                        Blocks& blocks, WaveStatistics& stats, WaveOutputs<kDim>& out) {
    constexpr int kBytes = kBlockBytes<kDim>;
    const uint32_t lane = me.lane, quarter = me.quarter;
    const bool group_b = me.group_b;
    const int32_t kv_head =
        UniformInt(static_cast<uint32_t>(tile.q_head / (p.q_heads / p.kv_heads)));
    const int32_t first_row = tile.q_block * kQBlock + static_cast<int32_t>(me.wave) * kWaveRows;
    const KSource keys{At(p.k, p.k_strides, tile.batch, 0, kv_head),
                       static_cast<uint32_t>(p.k_strides.seq * 2), p.kv_len};
    const KCopier<kDim> copier(lane, quarter);
    using CopyK = KCopies<kDim, Blocks::kFewScalars>;
    using CopyV = VCopies<kDim, Blocks::kFewScalars>;

    const int32_t k_blocks = static_cast<int32_t>(KBlocks(p.kv_len));
    const char* v_t = reinterpret_cast<const char*>(p.v_t) +
                      (static_cast<int64_t>(tile.batch) * p.kv_heads + kv_head) * k_blocks * kBytes;
    char* const v_lds = lds + 2 * kBytes;

    if (!group_b) {
        LoadK<kDim, Blocks::kFewScalars>(keys, copier, blocks.At(0), quarter, lds);
    } else {
        if (blocks.Has(1))
            LoadK<kDim, Blocks::kFewScalars>(keys, copier, blocks.At(1), quarter, lds + kBytes);
        CopyV copy;
        Unroll<CopyV::kSteps>(
            [&](auto i) { copy.template Begin<i>(v_t, blocks.At(0), quarter, v_lds); });
        Unroll<CopyV::kCount>([&](auto i) { copy.template Copy<i>(lane); });
    }

    Queries<L, kDim, kQTiles> queries;
    LoadQueries(At(p.q, p.q_strides, tile.batch, 0, tile.q_head), p.q_strides.seq * 2, first_row,
                p.q_len, p.scale_log2, lane, queries);
    const float c = Factor(p.scale_log2);

    const uint32_t k_read = static_cast<uint32_t>(KReadByte<L>(kDim, 0, 0, static_cast<int>(lane)));
    const char* const v_read = v_lds + lane * kChunkBytes;

    WaveScores scores;
    KRing k_ring;

    // Keys of the current K block.
    const auto valid = [&] { return keys.kv_len - blocks.At(0) * kKBlock; };

    WaitLoads();
    Barrier();

    // The main loop, once per group: what a group copies stands in its program, not behind a
    // branch.
    const auto run = [&](auto is_group_b) {
        constexpr bool kGroupB = is_group_b;
        using Slot = Slots<kDim>;
        // V of the next K block: group A copies what Pv begins with, B the rest.
        constexpr int kFirstV = kGroupB ? kVAhead : 0, kEndV = kGroupB ? CopyV::kCount : kVAhead;
        constexpr int kEndK = kGroupB ? 0 : CopyK::kCount;
        static_assert(Slot::Copy(Slot::kAll - 1, Slot::kK) + 1 >= CopyK::kCount);
        uint32_t half = 0;  // of K and of V in LDS, holding the current K block
        const auto v_fragment = [&](int f) { return VFragment(v_read + half, f); };
        // In two parts: the waves of two SIMDs share a path from LDS, and exchange maxima over it.
        const auto start_pv = [&](VRing& ring) {
            return [&](auto part) {
                constexpr int kFrom = part * kVAhead / 2, kTo = kFrom + kVAhead / 2;
                StartPv<L, kQTiles, kKBlock, kFrom, kTo>(v_fragment, ring);
            };
        };
        StartQk<L, kDim, kQTiles>(lds, k_read, k_ring);
        Qk<Number>(lds, k_read, queries, k_ring, scores, [](auto) {});
        const auto end_products = [] {
            Barrier();
            Priority<0>();
        };
        // The branches to what follows, and back to the loop's head, belong to the shorter stretch:
        // Softmax at D = 128.
        constexpr bool kShortProducts = kDim < 128;
        if constexpr (!kShortProducts) Barrier();
        while (blocks.Has(1)) {
            if constexpr (kShortProducts) end_products();
            const uint32_t other = half ^ kBytes;
            Probabilities<L, kQTiles, kKBlock> probs;
            VRing v_ring;
            Softmax<Number>(scores, Blocks::kRaggedLast ? kKBlock : valid(), 0, c, me.across,
                            blocks, stats, out, probs, start_pv(v_ring));
            const auto take_turn = [&] {
                if constexpr (!kGroupB) WaitLoads();
                Priority<1>();
                Barrier();
            };
            if constexpr (kShortProducts) take_turn();

            CopyK copy_k;
            CopyV copy_v;
            const auto beside = [&](auto slot) {
                constexpr int step = slot - Slot::kAdvance;
                if constexpr (step >= 0 && step < Blocks::kSteps) blocks.template Advance<step>();
                constexpr int begin_v = slot - Slot::kBeginV;
                if constexpr (begin_v >= 0 && begin_v < CopyV::kSteps)
                    copy_v.template Begin<begin_v>(v_t, blocks.At(0), quarter, v_lds + other);
                constexpr int v = Slot::Copy(slot, Slot::kV);
                if constexpr (v >= 0 && kFirstV + v < kEndV)
                    copy_v.template Copy<VPlace<L, kQTiles, kKBlock>(kFirstV + v)>(lane);
                // Nothing to copy: the same instructions, but nothing is fetched. A branch around
                // each would cost 2 % of the time.
                constexpr int begin_k = Slot::BeginK(slot);
                if constexpr (kEndK > 0 && begin_k >= 0)
                    copy_k.template Begin<begin_k>(keys, blocks.At(blocks.Has(1)), blocks.Has(1),
                                                   quarter, lds + half);
                constexpr int k = Slot::Copy(slot, Slot::kK);
                if constexpr (k >= 0 && k < kEndK) copy_k.template Copy<k>(copier);
            };
            const auto start_qk = [&](auto f) {
                k_ring[f] = KFragment<L, kDim, kQTiles>(lds + other, k_read, f);
            };
            if (!blocks.LeftOut()) {
                if constexpr (!kShortProducts) take_turn();
                PvFrom<Number>(v_fragment, probs, v_ring, out, beside, start_qk);
            } else {
                if constexpr (!kShortProducts) take_turn();
                Unroll<kKAhead>(start_qk);
                Unroll<Slot::kPv>(beside);
            }
            Qk<Number>(lds + other, k_read, queries, k_ring, scores,
                       [&](auto slot) { beside(Constant<slot + Slot::kPv>{}); });
            half = other;
            WaitLoadsBut<kEndK>();  // V, which is older than K
            if constexpr (!kShortProducts) end_products();
        }
        if constexpr (kShortProducts) end_products();
        Probabilities<L, kQTiles, kKBlock> probs;
        VRing v_ring;
        const uint32_t hidden =
            static_cast<uint32_t>(__builtin_elementwise_max(kKBlock - valid(), 0));
        Softmax<Number>(scores, valid(), hidden, c, me.across, blocks, stats, out, probs,
                        start_pv(v_ring));
        if constexpr (!kGroupB) Barrier();  // the rest of V has landed; as many barriers as group B
        if (!blocks.LeftOut())
            PvFrom<Number>(v_fragment, probs, v_ring, out, [](auto) {}, [](auto) {});
    };
    if (group_b) {
        Barrier();  // half a K block behind from here on
        run(Constant<true>{});
    } else {
        run(Constant<false>{});
    }
}

// Where a wave's rows of `out` and `lse` begin, and how many of them exist (0 or less: none).
struct WaveRows {
    char* out;
    float* lse;  // null: not wanted
    int32_t count;
};
template <class Params>
LITE_DEVICE WaveRows RowsOf(const Params& p, const Tile& tile, const WaveId& me) {
    const int32_t first = tile.q_block * kQBlock + static_cast<int32_t>(me.wave) * kWaveRows;
    const int64_t lse_row =
        (static_cast<int64_t>(tile.batch) * p.q_heads + tile.q_head) * p.q_len + first;
    return {const_cast<char*>(At(p.out, p.out_strides, tile.batch, first, tile.q_head)),
            p.lse ? p.lse + lse_row : nullptr, p.q_len - first};
}

// Writes a tile's rows of `out` and, if wanted, `lse`.
template <class Number, int kDim, class Params>
LITE_DEVICE void StoreTile(const Params& p, const Tile& tile, const WaveId& me,
                           const WaveStatistics& stats, const WaveOutputs<kDim>& out) {
    const WaveRows rows = RowsOf(p, tile, me);
    StoreResult<Number>(rows.out, p.out_strides.seq * 2, rows.lse, rows.count, Factor(p.scale_log2),
                        me.lane, me.across, stats, out);
}

// Writes a wave's rows of part `slot`: `part_out` and `part_stats` of the parameters.
template <int kDim, class Params>
LITE_DEVICE void StorePartOf(const Params& p, int64_t slot, const WaveId& me,
                             const WaveStatistics& stats, const WaveOutputs<kDim>& out) {
    const int64_t row = slot * kQBlock + me.wave * kWaveRows;
    float* part_stats = p.part_stats + slot * 2 * kQBlock;
    StorePart(p.part_out + row * kDim, part_stats + me.wave * kWaveRows, me.lane, me.across, stats,
              out);
}

}  // namespace liteattention::gfx942
