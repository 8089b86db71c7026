// Scores of K blocks become probabilities: soft cap, masks, votes of LiteAttention, the running
// maximum. Query rows are the lanes.

#include "walk.h"

namespace {

template <class Gemm, DType kType>
struct Softmax : WalkBase<Gemm, kType> {
    using Base = WalkBase<Gemm, kType>;
    using Base::HiddenRows, Base::KeyDim, Base::Keys, Base::ValueRows, Base::Values,
        Base::VBlockBytes;
    using Base::kEdgeRows, Base::kElement, Base::kPairs;
    using typename Base::Rows, typename Base::Scratch, typename Base::Walk;

    // Turns raw scores into capped, scaled ones.
    static void Cap(const Walk& walk, float* scores) {
        const SoftCap cap(walk.p);
        for (int64_t i = 0; i < kKBlock * walk.stride; i += Vec::kLanes)
            cap(Vec::Load(scores + i)).Store(scores + i);
    }

    // Sets the scores of keys that do not exist or may not be seen to -inf.
    static void MaskBlock(const Walk& walk, int64_t block, float* scores) {
        const AttentionParams& p = walk.p;
        const int64_t key = block * kKBlock;
        for (int64_t i = Min(kKBlock, p.kv_len - key); i < kKBlock; ++i)
            for (int64_t r = 0; r < walk.stride; ++r) scores[i * walk.stride + r] = kLowest;
        const int64_t offset = p.kv_len - p.q_len;
        const bool above = p.Bounded() && key + kKBlock > p.EndOf(walk.first);
        const bool below = p.window && key <= walk.first + offset + walk.per_head - 1 - p.window;
        if (!above && !below) return;
        if (below || walk.per_head != walk.rows) return MaskLanes(walk, key, scores);
        for (int64_t i = 0; i < kKBlock; ++i) {
            const int64_t hidden = Min(walk.stride, key + i + 1 - p.EndOf(walk.first));
            for (int64_t r = 0; r < hidden; ++r) scores[i * walk.stride + r] = kLowest;
        }
    }

    // MaskBlock for windows and for lanes of several heads: each lane has its own range of keys.
    static void MaskLanes(const Walk& walk, int64_t key, float* scores) {
        const AttentionParams& p = walk.p;
        alignas(64) int32_t low[kMaxQTile], high[kMaxQTile];  // visible keys of the block
        for (int64_t r = 0; r < walk.stride; ++r) {
            const int64_t at = walk.first + p.kv_len - p.q_len + r % walk.per_head - key;
            const int64_t from = p.window ? at - p.window + 1 : 0;
            const int64_t to = p.Bounded() ? at + p.lookahead : kKBlock;
            low[r] = static_cast<int32_t>(from < 0 ? 0 : Min(from, kKBlock));
            high[r] = static_cast<int32_t>(to < -1 ? -1 : Min(to, kKBlock));
        }
        for (int32_t i = 0; i < kKBlock; ++i) {
            float* row = scores + i * walk.stride;
            for (int64_t r = 0; r < walk.stride; ++r)
                row[r] = i < low[r] || i > high[r] ? kLowest : row[r];
        }
    }

    // Folds a block's row maxima into the running maximum after voting on them, and returns the
    // slots whose contribution soft_skip drops. The first block walked is never voted out: it is
    // infinitely far above a running maximum of -inf. Fetches the block's values meanwhile.
    static uint32_t Maxima(const Walk& walk, int64_t block, const float* scores) {
        const Scratch& s = walk.s;
        const int64_t stride = walk.stride;
        const char* values = Values(walk, block);
        const int64_t value_bytes = static_cast<int64_t>(VBlockBytes(walk.p)) / kKBlock;
        uint32_t drop[kMaxQTile / kRowStep] = {};  // lanes of a slot that vote drop
        Panels(stride, [&](auto width, int64_t r) {
            constexpr int kVecs = width.value;
            Vec top[kVecs];
            for (int x = 0; x < kVecs; ++x) top[x] = Vec::Set(kLowest);
            for (int i = 0; i < kKBlock; ++i) {
                if (r == 0) Fetch(values + i * value_bytes, value_bytes);
                for (int x = 0; x < kVecs; ++x)
                    top[x] = Vec::Max(top[x], Vec::Load(scores + i * stride + r + x * Vec::kLanes));
            }
            for (int x = 0; x < kVecs; ++x) {
                const int64_t row = r + x * Vec::kLanes;
                const Vec running = Vec::Load(s.running + row);
                if (walk.vote) {
                    const Vec above = (top[x] - running) * Vec::Set(walk.c);
                    const uint32_t lanes =
                        Vec::LessEqual(above, Vec::Set(walk.task.lite->threshold));
                    drop[row / kRowStep] |= lanes << (row % kRowStep);
                }
                Vec::Max(running, top[x]).Store(s.running + row);
            }
        });
        if (!walk.vote) return 0;
        KeepNan(walk, scores, drop);
        return Tally(walk, block, drop);
    }

    // Sets M to the running maximum and alpha to what earlier sums and outputs shrink by.
    static void Shift(const Walk& walk) {
        const Scratch& s = walk.s;
        const Vec zero = Vec::Set(0.0f), lowest = Vec::Set(kLowest);
        for (int64_t r = 0; r < walk.stride; r += Vec::kLanes) {
            const Vec before = Vec::Load(s.shift + r), running = Vec::Load(s.running + r);
            const uint32_t none = Vec::Equal(running, lowest);
            const Vec shift = Vec::Select(none, zero, running);
            // Where nothing was summed yet there is nothing to shrink, and M was not a maximum.
            const uint32_t fresh = Vec::Equal(Vec::Load(s.sum + r), zero);
            Exp2(Vec::Select(fresh, zero, (before - shift) * Vec::Set(walk.c))).Store(s.alpha + r);
            shift.Store(s.shift + r);
        }
    }

    // Turns a group's scores into probabilities. Fetches the next group's keys meanwhile: the
    // matrix unit would otherwise wait for them (at 8,192 keys they come from the L3 cache).
    static void Probabilities(const Walk& walk, int blocks, const uint32_t* dropped,
                              const int32_t* kept, int64_t left) {
        const Scratch& s = walk.s;
        const int64_t stride = walk.stride;
        const int64_t key_bytes = KeyDim(walk.p) * kElement;
        const Vec c = Vec::Set(walk.c);
        Panels(stride, [&](auto width, int64_t r) {
            constexpr int kVecs = width.value;
            Vec shift[kVecs], sum[kVecs];  // of the block's keys
            for (int x = 0; x < kVecs; ++x) {
                const int64_t row = r + x * Vec::kLanes;
                shift[x] = Vec::Load(s.shift + row);
                (Vec::Load(s.sum + row) * Vec::Load(s.alpha + row)).Store(s.sum + row);
            }
            for (int t = 0; t < blocks; ++t) {
                // Output reads nothing of blocks that none of its rows sees.
                const int64_t end = RoundUp(r + kVecs * Vec::kLanes, kEdgeRows);
                if (HiddenRows(walk, kept[t] * int64_t{kKBlock}) >= end) continue;
                float* scores = s.scores + t * kKBlock * stride + r;
                if (dropped[t]) MaskSlots(walk, dropped[t], r, kVecs, scores);
                const bool fetch = r == 0 && t + kGroup < left;
                const Rows next = Keys(walk, kept[fetch ? t + kGroup : t]);
                for (int x = 0; x < kVecs; ++x) sum[x] = Vec::Set(0.0f);
                for (int i = 0; i < kKBlock; i += Gemm::kPerWord) {
                    if (fetch)
                        for (int e = 0; e < Gemm::kPerWord; ++e)
                            Fetch(next.data + (i + e) * next.stride, key_bytes);
                    float* row = scores + i * stride;
                    for (int x = 0; x < kVecs; ++x) {
                        float* at = row + x * Vec::kLanes;
                        const Vec even = Exp2((Vec::Load(at) - shift[x]) * c);
                        if constexpr (kPairs) {
                            const Vec odd = Exp2((Vec::Load(at + stride) - shift[x]) * c);
                            sum[x] = sum[x] + (even + odd);
                            uint32_t* to = s.probs + (t * kKBlock + i) / 2 * stride + r;
                            Gemm::Pair(even, odd, to + x * Vec::kLanes);
                        } else {
                            sum[x] = sum[x] + even;
                            even.Store(at);
                        }
                    }
                }
                for (int x = 0; x < kVecs; ++x) {
                    float* all = s.sum + r + x * Vec::kLanes;
                    (Vec::Load(all) + sum[x]).Store(all);
                }
                if (walk.weigh) s.mass[kept[t]] += Share<kVecs>(walk, r, sum);
            }
        });
    }

    static void Rescale(const Walk& walk) {
        const Scratch& s = walk.s;
        const int64_t dims = ValueRows(walk.p);
        for (int64_t r = 0; r < walk.stride; r += kRowStep) {
            Vec alpha[kRowStep / Vec::kLanes];
            uint32_t same = 0;
            for (int x = 0; x < kRowStep / Vec::kLanes; ++x) {
                alpha[x] = Vec::Load(s.alpha + r + x * Vec::kLanes);
                same |= Vec::Equal(alpha[x], Vec::Set(1.0f)) << (x * Vec::kLanes);
            }
            if (same == 0xffff) continue;  // no row of the slot found a new maximum
            for (int64_t d = 0; d < dims; ++d) {
                float* row = s.output + d * walk.stride + r;
                for (int x = 0; x < kRowStep / Vec::kLanes; ++x)
                    (Vec::Load(row + x * Vec::kLanes) * alpha[x]).Store(row + x * Vec::kLanes);
            }
        }
    }

   private:
    // The share that a block's keys have of all keys so far, added up over the valid rows of a
    // panel; infinite if it is more than kRowGuard in one of them. `block` are their sums; those of
    // all keys include them.
    template <int kVecs>
    static float Share(const Walk& walk, int64_t r, const Vec* block) {
        const Vec one = Vec::Set(1.0f), zero = Vec::Set(0.0f);
        Vec share = zero;
        uint32_t guarded = 0;
        for (int x = 0; x < kVecs; ++x) {
            const int64_t row = r + x * Vec::kLanes, left = Min(Vec::kLanes, walk.rows - row);
            const uint32_t valid = left > 0 ? (1u << left) - 1 : 0;
            const Vec all = Vec::Load(walk.s.sum + row);
            // A sum this small is relative to a maximum that a later block of the group has, and
            // lacks what underflowed, up to 2^-126 a key. At the end of the group it is at least 1.
            const uint32_t early = Vec::LessEqual(all, Vec::Set(0x1p-64f));
            const uint32_t none = Vec::Equal(Vec::Load(walk.s.running + row), Vec::Set(kLowest));
            const Vec seen = Vec::Select(early, one, all);
            const Vec part = Vec::Select(early & none, one, block[x] / seen);
            guarded |= valid & ~Vec::LessEqual(part, Vec::Set(kRowGuard));
            share = share + Vec::Select(valid, part, zero);
        }
        return share.Sum() + (guarded ? -kLowest : 0.0f);  // NaN stays NaN
    }

    // Asks for `bytes` at `from` to be brought into the L2 cache.
    static void Fetch(const char* from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    }

    // Calls body<NV>(row) over the rows in panels of up to 4 vectors.
    template <class Body>
    static void Panels(int64_t rows, Body body) {
        constexpr int64_t kLanes = Vec::kLanes;
        int64_t r = 0;
        for (; r + 4 * kLanes <= rows; r += 4 * kLanes) body(std::integral_constant<int, 4>{}, r);
        for (; r + 2 * kLanes <= rows; r += 2 * kLanes) body(std::integral_constant<int, 2>{}, r);
        for (; r < rows; r += kLanes) body(std::integral_constant<int, 1>{}, r);
    }

    // Takes back the drop votes of rows that have met a NaN, in this block or before it: Max loses
    // NaN on the way. Only a tile that would otherwise be dropped is looked through, so this costs
    // nothing on tiles that stay.
    static void KeepNan(const Walk& walk, const float* scores, uint32_t* drop) {
        const Scratch& s = walk.s;
        for (int64_t r = 0; r < walk.stride; r += Vec::kLanes) {
            const int64_t slot = r / kRowStep, shift = r % kRowStep;
            constexpr uint32_t kAll = (1u << Vec::kLanes) - 1;
            if (!(drop[slot] >> shift & kAll)) continue;
            // An infinite maximum makes the sum NaN without a NaN score: inf - inf.
            const Vec sum = Vec::Load(s.sum + r);
            uint32_t whole =
                Vec::Equal(sum, sum) | Vec::Equal(Vec::Load(s.running + r), Vec::Set(-kLowest));
            for (const float* at = s.scores + r; at < scores + kKBlock * walk.stride;
                 at += walk.stride) {
                const Vec score = Vec::Load(at);
                whole &= Vec::Equal(score, score);
            }
            drop[slot] &= ~((~whole & kAll) << shift);
        }
    }

    // Counts one block's votes: sets its bit if any valid row keeps it, and returns the slots
    // whose contribution soft_skip drops.
    static uint32_t Tally(const Walk& walk, int64_t block, const uint32_t* drop) {
        const LiteParams* lite = walk.task.lite;
        const int64_t slots = walk.stride / kRowStep;
        uint32_t slot_drops = 0;
        for (int64_t i = 0; i < slots; ++i) {
            const int64_t valid = Min(kRowStep, walk.rows - i * kRowStep);
            const uint32_t rows = (1u << valid) - 1;
            slot_drops |= static_cast<uint32_t>((drop[i] & rows) == rows) << i;
        }
        const uint32_t all = (1u << slots) - 1;
        const bool must = lite->must_do && (lite->must_do[block / 32] >> (block % 32) & 1);
        if (slot_drops != all) walk.s.votes[block / 32] |= 1u << (block % 32);
        if (!walk.soft || must) return 0;
        uint32_t dropped = 0;
        const int64_t per_group = lite->vote_rows / kRowStep;
        for (int64_t i = 0; i < slots; i += per_group) {
            const uint32_t group = ((1u << Min(per_group, slots - i)) - 1) << i;
            if ((slot_drops & group) == group) dropped |= group;
        }
        return dropped;
    }

    // Hides the dropped 16-row slots of a panel from this step: their scores become -inf.
    static void MaskSlots(const Walk& walk, uint32_t dropped, int64_t r, int vecs, float* scores) {
        for (int64_t x = 0; x < vecs * Vec::kLanes; ++x) {
            if (!(dropped >> ((r + x) / kRowStep) & 1)) continue;
            for (int i = 0; i < kKBlock; ++i) scores[i * walk.stride + x] = kLowest;
        }
    }
};

}  // namespace
