// What a step learns by voting: which tiles the next one may leave out.
//
// A tile is one q block against one K block. It stays in the list of the next step unless every row
// of the q block says that it lies too far below what the row has seen before:
//
//   (largest score of the tile - running maximum before the tile) c <= threshold        fp32, log2
//
// c and the threshold as in attention.h and params.h. A row says so of no tile before its running
// maximum is finite (inf <= threshold and NaN <= threshold are false), of no tile of the must-do
// list, never at threshold -inf, and never again after it has met a NaN. Rows past the end of the
// sequence repeat the last row (qk.h) and so vote as it does. Method: LiteAttention,
// arXiv 2511.11062.
//
// A wave's vote is one bit, kept in a scalar register for up to 32 K blocks and then OR-ed into the
// next step's row in memory: it costs the hot loop 7 vector instructions, and the workgroup no
// barrier.
#pragma once

#include "kept_blocks.h"

namespace liteattention::gfx942 {

// The workgroup clears the row that votes are OR-ed into. WaitLoads() and a barrier must follow.
LITE_DEVICE void ClearVotes(const LiteParams& p, int64_t bitmap) {
    uint32_t* const write = p.write + bitmap;
    const int32_t words = static_cast<int32_t>(SkipWords(p.kv_len));
#pragma unroll 1
    for (int32_t w = static_cast<int32_t>(ThreadId()); w < words; w += kDenseThreads) write[w] = 0;
}

class VotedBlocks : public KeptBlocks<LiteParams> {
   public:
    // `bitmap` is where the tile's rows begin, in words.
    LITE_DEVICE VotedBlocks(const LiteParams& p, int64_t bitmap)
        : KeptBlocks(p, bitmap),
          threshold_(Bits(p.threshold) == kMinusInfinity ? kNever : Bits(p.threshold)),
          soft_(p.soft_skip != 0) {}

    LITE_DEVICE void Advance() {
        if (LeavesWord()) Flush();
        Step();
    }

    // `top` are the maxima of the tile, `before` the statistics without it. False: the wave drops
    // the tile's contribution, too (soft_skip). No maximum rises then, since the threshold is <= 0.
    LITE_DEVICE bool Vote(const float (&top)[kQTiles], const WaveStatistics& before,
                          const WaveScores& scores, float c) {
        const float threshold = FromBits(Now() & kMust ? kNever : threshold_);
        uint64_t drop = ~uint64_t{0};
        float highest = FromBits(kMinusInfinity);
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            drop &= LanesLessEqual((top[x] - before.max[x]) * c, threshold);
            highest = __builtin_fmaxf(highest, __builtin_fmaxf(before.max[x], top[x]));
        }
        const bool all = drop == ~uint64_t{0};
        if (all || LanesEqual(highest, FromBits(kPlusInfinity))) NoteNan(before, scores);
        const bool keep = !all || met_nan_;
        if (keep) unflushed_ |= 1u << (Now() & 31u);
        return keep || !soft_;
    }

    // Hands the last votes over. From the whole wave, scalar.
    LITE_DEVICE void Flush() {
        if (unflushed_) {
            const LiteParams& p = ArgumentAgain<LiteParams>();
            const SkipRows rows(p, Bitmap());
            const int32_t place = rows.Place(static_cast<int32_t>((Now() & kPlace) / 32));
            // All lanes name the same word and bits: the compiler lets one of them do it.
            __hip_atomic_fetch_or(&(p.write + Bitmap())[place], rows.Walk(unflushed_),
                                  __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        }
        unflushed_ = 0;
    }

   private:
    static constexpr uint32_t kPlusInfinity = 0x7f800000u;
    static constexpr uint32_t kNever = 0x7fc00000u;  // a NaN: nothing is <= it

    // Finds lanes that have met a NaN: now, or before, which shows in their sum. A maximum of +inf
    // makes the sum NaN without one (inf - inf), so once a row's maximum is +inf this must look at
    // every tile; else only at those that would be dropped.
    LITE_DEVICE void NoteNan(const WaveStatistics& before, const WaveScores& scores) {
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            met_nan_ |= LanesUnordered(before.sum[x], before.sum[x]) &
                        ~LanesEqual(before.max[x], FromBits(kPlusInfinity));
#pragma unroll
            for (int t = 0; t < kKBlock / L::kTile; ++t)
#pragma unroll
                for (int i = 0; i < L::kRegisters; i += 4) {
                    const auto& tile = scores.tile[t][x];
                    met_nan_ |= LanesUnordered(tile[i], tile[i + 1]) |
                                LanesUnordered(tile[i + 2], tile[i + 3]);
                    SchedulingFence();  // 16 masks at once would not fit in the scalar registers
                }
        }
    }

    uint32_t threshold_;  // bits
    bool soft_;

    uint32_t unflushed_ = 0;  // votes of the word of the current block
    uint64_t met_nan_ = 0;    // lanes, of any of their rows
};

}  // namespace liteattention::gfx942
