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
// next step's row in memory: it costs the hot loop 5 vector instructions, and the workgroup no
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
          soft_(static_cast<uint32_t>(p.soft_skip)) {
        Begin();
    }

    // In kSteps steps, each of which fits beside one MFMA.
    template <int kStep>
    LITE_DEVICE void Advance() {
        if constexpr (kStep == 0) {
            if (LeavesWord()) {
                Seldom();
                Flush();
            }
        } else {
            Walk<kStep>();
            if constexpr (kStep == 1) Begin();
        }
    }

    // `top` are the maxima of the tile, `before` the statistics without it: not 0 if every row of
    // the wave would drop it.
    LITE_DEVICE uint64_t Look(const float (&top)[kQTiles], const WaveStatistics& before, float c) {
        uint64_t drop = ~uint64_t{0};
#pragma unroll
        for (int x = 0; x < kQTiles; ++x)
            drop &= LanesLessEqual((top[x] - before.max[x]) * c, limit_);
        drops_ = All(drop);
        return drops_;
    }

    // Takes the vote: of all tiles that Look picks, and others. NaN is looked for in tiles that
    // would be dropped, and in all once a row's maximum is +inf.
    LITE_DEVICE void Decide(const WaveStatistics& stats, const WaveScores& scores) {
        uint64_t look = drops_;
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) look |= LanesEqual(stats.max[x], FromBits(kPlusInfinity));
        if (look != 0) NoteNan(stats, scores);
        dropped_ |= met_nan_ != 0 ? 0u : drops_;
        unflushed_ ^= dropped_ << (Now() & 31u);
    }
    // Whether the wave drops the tile's contribution, too (soft_skip).
    static constexpr bool kLeavesOut = true, kShared = false;
    LITE_DEVICE bool LeftOut() {
        // Two questions to the compiler: one answer would be held as a mask of lanes in between.
        dropped_ = static_cast<uint32_t>(ScalarHere(static_cast<int32_t>(dropped_)));
        return (dropped_ & soft_) != 0;
    }

    // Hands the last votes over. From the whole wave, scalar; its first lane does it.
    LITE_DEVICE void Flush() {
        if (unflushed_) {
            const LiteParams& p = ArgumentAgain<LiteParams>();
            const SkipRows rows(p, Bitmap());
            const int32_t place = rows.Place(static_cast<int32_t>((Now() & kPlace) / 32));
            const Word4 word =
                DescriptorWords(reinterpret_cast<const char*>(p.write + Bitmap() + place), 4);
            OrWord(word, LaneHere() * 4, rows.Walk(unflushed_));
        }
        unflushed_ = static_cast<uint32_t>(ScalarHere(0));
    }

   private:
    static constexpr uint32_t kPlusInfinity = 0x7f800000u;
    static constexpr uint32_t kNever = 0x7fc00000u;  // a NaN: nothing is <= it

    // What a vote on the current block starts from.
    LITE_DEVICE void Begin() {
        // All ones are a NaN, too: nothing is <= it.
        const uint32_t must = static_cast<uint32_t>(static_cast<int32_t>(Now()) >> 31);
        limit_ = FromBits(threshold_ | must);
        Pin(limit_);
        unflushed_ |= 1u << (Now() & 31u);
        dropped_ = static_cast<uint32_t>(ScalarHere(0));
    }

    // 1 if all lanes are in it, else 0. Counted out of the compiler's sight, which would compare,
    // and make a mask of lanes of the result.
    static LITE_DEVICE uint32_t All(uint64_t lanes) {
        return static_cast<uint32_t>(ScalarHere(__builtin_popcountll(lanes))) / kWaveSize;
    }

    // Finds lanes that have met a NaN: now, or before, which shows in their sum. Once probabilities
    // are relative to +inf the sum is NaN without one (inf - inf): from then on, and in the tile
    // where it begins, this must look at every tile. Softmax comes here for each of them, since a
    // maximum that becomes +inf rises, and is wide ever after.
    LITE_DEVICE void NoteNan(const WaveStatistics& stats, const WaveScores& scores) {
        uint64_t lanes = 0;
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            lanes |= LanesUnordered(stats.sum[x], stats.sum[x]) &
                     ~LanesEqual(stats.top[x], FromBits(kPlusInfinity));
#pragma unroll
            for (int t = 0; t < kKBlock / L::kTile; ++t)
#pragma unroll
                for (int i = 0; i < L::kRegisters; i += 4) {
                    const auto& tile = scores.tile[t][x];
                    lanes |= LanesUnordered(tile[i], tile[i + 1]) |
                             LanesUnordered(tile[i + 2], tile[i + 3]);
                    SchedulingFence();  // 16 masks at once would not fit in the scalar registers
                }
        }
        met_nan_ |= AnyBits(lanes);
    }

    uint32_t threshold_;  // bits
    uint32_t soft_;       // 0 or 1: a bool would be a mask of lanes

    float limit_;             // the threshold of the current block; a vector register
    uint32_t unflushed_ = 0;  // votes of the word of the current block
    uint32_t drops_ = 0;      // from Look to Decide: 1 if every row would drop the tile
    uint32_t dropped_ = 0;    // 1: the wave votes to drop the current block
    uint32_t met_nan_ = 0;    // not 0 if any lane has, in any of its rows
};

}  // namespace liteattention::gfx942
