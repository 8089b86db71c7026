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
// next step's row in memory: it costs the hot loop 8 vector instructions (6 at D = 64), and the
// workgroup no barrier.
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
          soft_(static_cast<uint32_t>(p.soft_skip)) {}

    // In kSteps steps, each of which fits beside one MFMA.
    template <int kStep>
    LITE_DEVICE void Advance() {
        if constexpr (kStep == 0) {
            if (LeavesWord()) Flush();
        } else {
            if constexpr (kStep == 1) Record();
            Walk<kStep>();
        }
    }

    // `top` are the maxima of the tile, `before` the statistics without it: not 0 if Decide must
    // look at the tile; if 0, the wave keeps it.
    LITE_DEVICE uint64_t Look(const float (&top)[kQTiles], const WaveStatistics& before, float c) {
        // All ones are a NaN, too: nothing is <= it.
        const uint32_t must = static_cast<uint32_t>(static_cast<int32_t>(Now()) >> 31);
        const float threshold = FromBits(threshold_ | must);
        float highest = FromBits(kMinusInfinity);
        uint64_t drop = ~uint64_t{0};
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            drop &= LanesLessEqual((top[x] - before.max[x]) * c, threshold);
            highest = __builtin_fmaxf(highest, __builtin_fmaxf(before.max[x], top[x]));
        }
        keep_ = 1;
        drops_ = All(drop);
        look_ = LanesEqual(highest, FromBits(kPlusInfinity)) | drops_;
        return look_;
    }

    // 0: the wave drops the tile's contribution, too (soft_skip). No maximum rises then, since the
    // threshold is <= 0.
    LITE_DEVICE int32_t Decide(const WaveStatistics& before, const WaveScores& scores) {
        if (look_ != 0) NoteNan(before, scores);
        keep_ = drops_ == 0 || met_nan_ != 0 ? 1u : 0u;
        return (keep_ | (soft_ ^ 1u)) != 0;
    }

    // Hands the last votes over. From the whole wave, scalar; its first lane does it.
    LITE_DEVICE void Flush() {
        Record();
        if (unflushed_) {
            const LiteParams& p = ArgumentAgain<LiteParams>();
            const SkipRows rows(p, Bitmap());
            const int32_t place = rows.Place(static_cast<int32_t>((Now() & kPlace) / 32));
            const Word4 word =
                DescriptorWords(reinterpret_cast<const char*>(p.write + Bitmap() + place), 4);
            OrWord(word, LaneHere() * 4, rows.Walk(unflushed_));
        }
        unflushed_ = keep_ = 0;
    }

   private:
    static constexpr uint32_t kPlusInfinity = 0x7f800000u;
    static constexpr uint32_t kNever = 0x7fc00000u;  // a NaN: nothing is <= it

    // Notes the vote on the current block.
    LITE_DEVICE void Record() { unflushed_ |= keep_ << (Now() & 31u); }

    // 1 if all lanes are in it, else 0. Counted out of the compiler's sight, which would compare,
    // and make a mask of lanes of the result.
    static LITE_DEVICE uint32_t All(uint64_t lanes) {
        return static_cast<uint32_t>(ScalarHere(__builtin_popcountll(lanes))) / kWaveSize;
    }

    // Finds lanes that have met a NaN: now, or before, which shows in their sum. A maximum of +inf
    // makes the sum NaN without one (inf - inf), so once a row's maximum is +inf this must look at
    // every tile; else only at those that would be dropped.
    LITE_DEVICE void NoteNan(const WaveStatistics& before, const WaveScores& scores) {
        uint64_t lanes = 0;
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            lanes |= LanesUnordered(before.sum[x], before.sum[x]) &
                     ~LanesEqual(before.max[x], FromBits(kPlusInfinity));
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

    uint32_t unflushed_ = 0;  // votes of the word of the current block
    uint32_t keep_ = 0;       // the vote on the current block, until it is in there
    uint32_t drops_ = 0;      // from Look to Decide: 1 if every row would drop the tile
    uint64_t look_ = 0;       // likewise: not 0 if there may be a NaN to note
    uint32_t met_nan_ = 0;    // not 0 if any lane has, in any of its rows
};

}  // namespace liteattention::gfx942
