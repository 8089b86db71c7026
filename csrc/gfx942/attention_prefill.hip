// Attention of many query rows against paged or packed keys: requests of any lengths in one launch,
// GQA, causal with a prefix, sliding window, soft cap, sinks; bf16 and fp16, D = 32 to 256
// (geometry.h: IsRaggedDim), caches of these numbers or of fp8.
//
// Road map. The rows of a tile are (query position, head of the group), so that keys are read once
// for all query heads that share them. A workgroup of 8 waves computes one tile of one (request, kv
// head), or one part of it along the keys: 256 rows, 32 a wave; from D = 192 on 128 rows, 16 a
// wave. MFMAs are of 32 x 32 where that fits (geometry.h: PrefillTileRows). It finds its request by
// a search over q_start; numbers that are nobody's tile end at once, and requests of few rows are
// attention_decode's. Parts are merge_prefill's to merge. Per K block of 64 keys (from D = 192 on
// 32) a wave runs Qk, Softmax and Pv as attention.h says; only blocks that some row of the tile
// sees are visited, a wave leaves out those that none of its own rows sees, and masks only those
// that not all of them see.
//
// K and V both come from LDS, where the keys of a block, which pages may scatter, lie in order, and
// V turned into operands (paged.h, mfma_layout.h). There an fp8 cache is one of 16 bits already:
// the copying group widens its numbers (cache.h).
//
// Schedule. As in attention.h two groups of four waves, B one barrier behind A, one on the matrix
// core while the other is on the vector ALU. A line is one stretch between two barriers:
//
//   A  Qk[0]          Softmax[0]        Pv[0] Qk[1]       Softmax[1]        Pv[1] Qk[2]
//                                       store V[1]                          store V[2]
//                                       load V[2]                           load V[3]
//   B  store K[1]     Qk[0]             Softmax[0]        Pv[0] Qk[1]       Softmax[1]
//      load K[2]                                          store K[2]
//                                                         load K[3]
//
// Group A copies V, group B K, both beside the MFMAs of Pv[n] Qk[n + 1] (CopySteps). A looks up the
// keys of block n + 2, stores V[n + 1], which the loads of a period before have brought into
// registers, and issues the loads of V[n + 2]; B does so with K of one block further. V[n + 1]
// overwrites V[n - 1] in stretch 2 n + 2; its last readers, Pv[n - 1] of B, were in stretch 2 n +
// 1, its first, Softmax[n + 1] of A, is in 2 n + 3. K[n + 2] overwrites K[n] in stretch 2 n + 3;
// its last readers, Qk[n] of B, were in stretch 2 n + 1, its first, Pv[n + 1] of A, is in 2 n + 4.
// Every hand-over thus has a barrier on either side, and loads have two stretches, ~4000 clocks, to
// land.
//
// Registers at D = 128, of 256 per lane: outputs 64, queries 32, scores 32 or, after them,
// probabilities 16, K or V in flight 16, fragments 16 + 16, places of keys 8. LDS: 2 x 16 KiB of K,
// 2 x 16 KiB of V: all of it. A fragment feeds 64 clocks of a matrix core and takes 8 clocks of the
// LDS: 56 % of its rate with the stores. From D = 192 on it feeds 32 clocks: there the LDS sets the
// pace.
//
// At D = 64 two workgroups share a compute unit, four waves a SIMD, as in attention_dense.hip. That
// leaves each 128 registers a lane. So K is read two fragments ahead; two of V before it is Pv's
// turn, two after; and keys or values in flight are stored before Qk begins, so that only places of
// keys stay beside its 32 scores. No register holds what one instruction makes of k_read or v_read.
//
// Budget: VGPR 208, LDS 65536 (32768 up to D = 64).

#include "attention.h"
#include "paged.h"
#include "ragged.h"

namespace liteattention::gfx942 {

// Whether two workgroups share a compute unit: 128 registers a lane, 32 KiB of LDS.
template <int kDim>
inline constexpr bool kTwoFit = kDim == 64;

// Every K block counts (softmax.h).
struct NoVote {
    template <class... Arguments>
    LITE_DEVICE uint64_t Look(const Arguments&...) const {
        return 0;
    }
    template <class... Arguments>
    LITE_DEVICE void Decide(const Arguments&...) const {}
    static constexpr bool kLeavesOut = false, kShared = false;
};

// Queries of a wave's packed rows (qk.h: LoadQueries).
template <class L, int kDim, int kTiles>
LITE_DEVICE void LoadPackedQueries(const RaggedParams& p, float scale_log2, const Request& request,
                                   int32_t q_head, const PackedRows& rows, int32_t first_row,
                                   uint32_t lane, Queries<L, kDim, kTiles>& q) {
    const uint32_t flip = scale_log2 < 0.0f ? 0x80008000u : 0u;
    const uint32_t keep = scale_log2 == 0.0f ? 0u : ~0u;
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        const int32_t row =
            rows.Existing(first_row + L::kTile * x + L::Col(static_cast<int>(lane)));
        const int32_t query = rows.Query(row), head = q_head + row - query * rows.heads;
        const uint16_t* from = p.q +
                               static_cast<int64_t>(request.first_row + query) * p.q_strides.row +
                               static_cast<int64_t>(head) * p.q_strides.head;
#pragma unroll
        for (int s = 0; s < kQkSteps<L, kDim>; ++s) {
            const int dim = L::QkDim(s, static_cast<int>(lane), 0);
            const bool own = 2 * L::kDepth * (s + 1) <= kDim || dim < kDim;  // else zero
            const Word4 words = *reinterpret_cast<const UnalignedWord4*>(from + (own ? dim : 0));
            q.fragment[x][s] = __builtin_bit_cast(Half8, (words ^ flip) & (own ? keep : 0u));
        }
    }
}

// The sign of the scale is in the queries.
template <class L, int kTiles, int kKeys>
LITE_DEVICE void CapScores(const RaggedParams& p, const ScoreFactors& factors,
                           Scores<L, kTiles, kKeys>& scores) {
    const float scale_log2 = __builtin_fabsf(factors.scale_log2);
    const float cap_factor = __builtin_fabsf(factors.cap_factor);
#pragma unroll
    for (int t = 0; t < kKeys / L::kTile; ++t)
#pragma unroll
        for (int x = 0; x < kTiles; ++x)
#pragma unroll
            for (int i = 0; i < L::kRegisters; ++i)
                scores.tile[t][x][i] =
                    CapScore(scores.tile[t][x][i], scale_log2, p.cap_log2, cap_factor);
}

// Hides the keys of block `block` that a wave's rows do not see.
template <class L, int kTiles, int kKeys>
LITE_DEVICE void MaskUnseen(const RaggedParams& p, const Request& request, const PackedRows& rows,
                            int32_t first_row, int32_t block, Scores<L, kTiles, kKeys>& scores) {
    const int lane = static_cast<int>(LaneHere());  // not before here, as in softmax.h: MaskKeys
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        const int32_t row = rows.Existing(first_row + L::kTile * x + L::Col(lane));
        const Seen seen = SeenBy(p, request, rows.Query(row));
        const uint32_t count =
            static_cast<uint32_t>(__builtin_elementwise_max(seen.end - seen.begin, 0));
        const uint32_t from =
            static_cast<uint32_t>(block * kKeys + L::ScoreKey(0, lane, 0) - seen.begin);
#pragma unroll
        for (int t = 0; t < kKeys / L::kTile; ++t)
#pragma unroll
            for (int i = 0; i < L::kRegisters; ++i) {
                const bool sees = from + static_cast<uint32_t>(L::ScoreKey(t, 0, i)) < count;
                scores.tile[t][x][i] = FromBits(sees ? Bits(scores.tile[t][x][i]) : kMinusInfinity);
            }
    }
}

// Normalises and writes a wave's rows that exist; `c` as in softmax.h. A sink is one more score
// without a value.
template <class Number, class Cache, int kDim, class L, int kColumns, int kTiles>
LITE_DEVICE void StorePackedRows(const RaggedParams& p, const Request& request, int32_t q_head,
                                 const PackedRows& rows, int32_t first_row, float c,
                                 const WaveId& me, const Statistics<L, kTiles>& stats,
                                 const Outputs<L, kColumns, kTiles>& out) {
    constexpr float kLog2e = 1.4426950408889634f;
    const float v_scale = Cache::kBytes == 1 ? ScaleOf(p.v_scale_at, p.v_scale) : 1.0f;
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        float sum = TotalSum<L>(stats.sum[x], me.across);
        float top = IsZero(sum) ? FromBits(kMinusInfinity) : stats.top[x] * c, shrink = 1.0f;
        const int32_t row = first_row + L::kTile * x + L::Col(static_cast<int>(me.lane));
        if (row >= rows.rows) continue;
        const int32_t query = rows.Query(row), head = q_head + row - query * rows.heads;
        const int32_t at = request.first_row + query;
        if (p.sinks) {
            const float sink = p.sinks[head] * kLog2e;
            const float higher = __builtin_fmaxf(top, sink);
            if (Bits(higher) != kMinusInfinity) {
                shrink = Exp2(top - higher);
                sum = sum * shrink + Exp2(sink - higher);
                top = higher;
            }
        }
        float scale = IsZero(sum) ? 0.0f : shrink * Rcp(sum);
        if constexpr (Cache::kBytes == 1) scale *= v_scale;
        char* to = reinterpret_cast<char*>(p.out + static_cast<int64_t>(at) * p.out_strides.row +
                                           static_cast<int64_t>(head) * p.out_strides.head);
        StoreRow<Number>(to, scale, x, me.lane, out, kDim);
        if (p.lse && L::Group(static_cast<int>(me.lane)) == 0) {
            const float value = (top + Log2(sum)) * kLn2;
            p.lse[head * p.lse_stride + at] = FromBits(IsZero(sum) ? kMinusInfinity : Bits(value));
        }
    }
}

// Writes a wave's rows that exist as part `index` of all, for merge_prefill: not normalised. A row
// that saw no key has a maximum of -inf.
template <class Cache, int kDim, class L, int kColumns, int kTiles>
LITE_DEVICE void StorePackedPart(const RaggedParams& p, int32_t index, const PackedRows& rows,
                                 int32_t first_row, const WaveId& me,
                                 const Statistics<L, kTiles>& stats,
                                 const Outputs<L, kColumns, kTiles>& out) {
    constexpr int kTileRows = PrefillRows(kDim);
    const float v_scale = Cache::kBytes == 1 ? ScaleOf(p.v_scale_at, p.v_scale) : 1.0f;
    float* const part_stats = p.prefill_stats + static_cast<int64_t>(index) * 2 * kTileRows;
    float* const part_out = p.prefill_out + static_cast<int64_t>(index) * kTileRows * kDim;
#pragma unroll
    for (int x = 0; x < kTiles; ++x) {
        const float sum = TotalSum<L>(stats.sum[x], me.across);
        const int32_t row = first_row + L::kTile * x + L::Col(static_cast<int>(me.lane));
        if (row >= rows.rows) continue;
        const int32_t of_tile = row - rows.first;
        if (L::Group(static_cast<int>(me.lane)) == 0) {
            part_stats[of_tile] = IsZero(sum) ? FromBits(kMinusInfinity) : stats.top[x];
            part_stats[kTileRows + of_tile] = sum;
        }
#pragma unroll
        for (int run = 0; run < kColumns / L::kDepth; ++run) {
            const int dim = L::RunDim(run, static_cast<int>(me.lane));
            if (kColumns != kDim && dim >= kDim) continue;
            Float4 values = OutputRun(out, run, x);
            if constexpr (Cache::kBytes == 1) values *= v_scale;
            *reinterpret_cast<Float4*>(part_out + of_tile * kDim + dim) = values;
        }
    }
}

// What a group does in a period to have keys or values ahead, in steps that fit beside an MFMA: it
// finds the keys of a block, stores the pieces of the block before it, which have arrived (of V one
// store for each head dim of a lane's pieces, of K one for each key), and loads the found ones.
template <int kDim, bool kOfK>
struct CopySteps {
    static constexpr int kStore = KeyPlaces::kSteps, kStores = kOfK ? 4 : PieceBytes(kDim) / 2;
    static constexpr int kLoad = kStore + kStores, kEnd = kLoad + 4;

    // The step in slot `slot` of `slots`, counted from Pv's first, or -1. Steps issue vector
    // instructions, and beside the other group's exponentials these would move them into the way of
    // MFMAs. So keys are found while that group looks for its maxima, and pieces stored and loaded
    // once it waits at the barrier. Modelled at D = 128, clk per 32x32x8: 34.7; all of it in every
    // second slot from the first on 36.8, in the softmax stretch 38.2.
    //
    // Where two workgroups share a compute unit, pieces are stored by the end of Pv, of `pv` slots:
    // Qk needs their registers for its scores.
    static constexpr int At(int slot, int slots, int pv) {
        if constexpr (kTwoFit<kDim>) {
            const int store = slot - (pv - kStores), load = slot - (slots - (kEnd - kLoad));
            if (load >= 0) return kLoad + load;
            if (store >= 0) return store < kStores ? kStore + store : -1;
            return slot % 2 == 0 && slot / 2 < kStore ? slot / 2 : -1;
        }
        const int past = slot - (slots - 1 - (kEnd - kStore));
        if (past >= 0) return past < kEnd - kStore ? kStore + past : -1;
        return slot % 2 == 0 && slot / 2 < kStore ? slot / 2 : -1;
    }
};

template <class Number, int kDim, class Cache>
LITE_DEVICE void AttentionPrefill(const RaggedParams& p) {
    using L = Layout<PrefillTileRows(kDim)>;
    constexpr int kTileRows = PrefillRows(kDim), kKeys = PrefillKeys(kDim);
    constexpr int kTiles = kTileRows / (kWaves * L::kTile), kWaveTileRows = kTiles * L::kTile;
    constexpr int kBytes = kKeys * LdsDims(kDim) * 2;  // of a block of K, and of one of V
    constexpr int kColumns = ProductDims(kDim);
    // With half of the registers K is read two fragments ahead, and of V, before it is Pv's turn,
    // two as well.
    constexpr bool kFew = kTwoFit<kDim>;
    constexpr int kKRing = kFew ? 2 : kKAhead, kEarlyV = kFew ? 2 : kVAhead;
    __shared__ __attribute__((aligned(16))) char lds[4 * kBytes];
    const WaveId me;

    const int32_t group = UniformInt(p.q_heads / p.kv_heads);
    const uint32_t slots =
        static_cast<uint32_t>(p.rows * group) / kTileRows + static_cast<uint32_t>(p.requests);
    const int32_t items = static_cast<int32_t>(PrefillItems(slots, p.prefill_room));
    const PrefillTile tile = PrefillTileOf(WorkgroupId(), static_cast<uint32_t>(items),
                                           static_cast<uint32_t>(p.kv_heads));
    const int32_t kv_head = UniformInt(tile.kv_head);
    PrefillItem item;
    if (!FindItem(p, UniformInt(tile.slot), items, group, kTileRows, kKeys, me.lane, item)) return;
    const Slot& slot = item.slot;
    const Request request = RequestOf(p, slot.request);
    const PackedRows rows{
        slot.tile * kTileRows, request.q_len * group, {p.group_multiplier, p.group_shift}, group};
    if (rows.first >= rows.rows || IsDecode(request.q_len, group)) return;

    // What the tile reads, and what this wave uses of it.
    const auto seen = [&](int32_t row) {
        return SeenBy(p, request, UniformInt(rows.Query(rows.Existing(row))));
    };
    const Seen tile_first = seen(rows.first), tile_last = seen(rows.first + kTileRows - 1);
    BlockRange blocks = BlocksOf(tile_first, tile_last, kKeys);
    const int32_t first_row = rows.first + static_cast<int32_t>(me.wave) * kWaveTileRows;
    BlockRange mine = BlocksOf(seen(first_row), seen(first_row + kWaveTileRows - 1), kKeys);
    if (first_row >= rows.rows) mine.end = mine.begin;
    const int32_t all = blocks.end - blocks.begin, part = item.part;
    const int32_t parts = UniformInt(PrefillPartsOf(all, item.rule.blocks, item.rule.splits));
    if (part >= parts) return;
    int32_t part_index = -1;  // of all parts; -1: the tile is whole
    if (parts > 1) {
        part_index = kv_head * p.prefill_room + item.first_part + part;
        const auto begin = [&](int32_t g) {
            return blocks.begin + UniformInt(PartBegin(g, parts, all));
        };
        const int32_t first = begin(part), end = begin(part + 1);
        const auto inside = [&](int32_t block) {
            return block < first ? first : block < end ? block : end;
        };
        blocks.begin = first;
        blocks.end = end;
        mine.begin = inside(mine.begin);
        mine.end = inside(mine.end);
    }

    const bool group_b = me.group_b;
    const PageStrides& strides = group_b ? p.k_strides : p.v_strides;
    const int64_t packed_rows = p.kv_start ? UniformInt(p.kv_start[request.number]) : 0;
    KeySource source;
    source.base = static_cast<const char*>(group_b ? p.k : p.v) +
                  (kv_head * strides.head + packed_rows * strides.row) * Cache::kBytes;
    source.page_bytes = static_cast<uint32_t>(strides.page * Cache::kBytes);
    source.row_bytes = static_cast<uint32_t>(strides.row * Cache::kBytes);
    source.page_size = static_cast<uint32_t>(p.page_size);
    source.pages = {p.page_multiplier, p.page_shift};
    const int32_t first_key = blocks.begin * kKeys, end_key = blocks.end * kKeys;
    source.lowest = first_key > tile_first.begin ? first_key : tile_first.begin;
    source.last = (end_key < tile_last.end ? end_key : tile_last.end) - 1;
    source.table =
        reinterpret_cast<const char*>(p.page_table + request.number * p.page_table_stride);
    source.table_bytes =
        p.page_size ? (Divide(static_cast<uint32_t>(source.last), source.pages) + 1) * 4u : 0u;

    const int thread = static_cast<int>(me.quarter * kWaveSize + me.lane);
    const int run = group_b ? KCopyRun(kDim, thread) : VCopyRun<L>(kDim, thread);
    const int piece = group_b ? KCopyPiece(kDim, thread) : VCopyPiece(kDim, thread);
    KeyPieces<Cache, kDim> pieces;
    // Past the head's own dims the last piece is repeated: no branch, and V's meet outputs of
    // nobody. K's are not read, or zero where they meet queries of zero: at D = 80.
    constexpr int kOwnPieces = kDim / pieces.kElements;
    const bool own_piece = piece < kOwnPieces;
    const uint32_t keep = own_piece ? ~0u : 0u;
    const uint32_t piece_byte = static_cast<uint32_t>((own_piece ? piece : kOwnPieces - 1) *
                                                      pieces.kElements * Cache::kBytes);
    const int piece_at = piece * PieceBytes(kDim);
    const uint32_t to = static_cast<uint32_t>(
        group_b ? KLdsByte(kDim, 4 * run, piece_at / kChunkBytes) + piece_at % kChunkBytes
                : VLdsByte<L>(kKeys, piece_at / 2, run) + 2 * kBytes);

    KeyPlaces places;
    // Step `i` of CopySteps: finds keys of `block`, stores to `half`.
    const auto step = [&](auto is_group_b, auto i, uint32_t half, int32_t block) {
        using Steps = CopySteps<kDim, is_group_b>;
        if constexpr (i < Steps::kStore) {
            places.template Find<i>(source, block * kKeys + 4 * run);
        } else if constexpr (i >= Steps::kLoad) {
            constexpr int key = i - Steps::kLoad;
            pieces.Load(key, places.At(source, piece_byte, key));
        } else if constexpr (is_group_b) {
            constexpr bool kPadded = kQkSteps<L, kDim> * 2 * L::kDepth != kDim;
            StoreKey<i - Steps::kStore, kPadded>(pieces, keep, to ^ half, lds);
        } else {
            StoreDim<i - Steps::kStore, L, kKeys>(pieces, to ^ half, lds);
        }
    };

    const bool capped = p.cap_log2 != 0.0f;
    const ScoreFactors factors = ScoreFactorsOf<Cache>(p);
    float c = capped ? 1.0f : Factor(factors.scale_log2);
    if constexpr (kFew) c = FromBits(Uniform(Bits(c)));
    Statistics<L, kTiles> stats;
    Outputs<L, kColumns, kTiles> out{};
    if (blocks.begin < blocks.end) {
        Queries<L, kDim, kTiles> queries;
        const auto load_queries = [&] {
            LoadPackedQueries(p, factors.scale_log2, request, kv_head * group, rows, first_row,
                              me.lane, queries);
        };
        uint32_t k_read =
            static_cast<uint32_t>(KReadByte<L>(kDim, 0, 0, static_cast<int>(me.lane)));
        uint32_t v_read =
            2 * kBytes + static_cast<uint32_t>(VReadByte<L>(static_cast<int>(me.lane)));
        if constexpr (kFew) {  // no sums with them are made ahead
            Pin(k_read);
            Pin(v_read);
        }
        const int32_t cap = static_cast<int32_t>(Bits(p.cap_log2));
        Scores<L, kTiles, kKeys> scores;
        Probabilities<L, kTiles, kKeys> probs;
        Half8 k_ring[kKRing];
        Half8 v_ring[kVAhead];
        NoVote no_vote;
        int32_t block = blocks.begin;
        uint32_t half = 0;  // of K and V, holding the current block

        // Once per group: what a group copies stands in its program, not behind branches.
        const auto attend = [&](auto is_group_b) {
            using Steps = CopySteps<kDim, is_group_b>;
            const auto copy = [&](uint32_t half, int32_t block) {
                Unroll<Steps::kEnd>([&](auto i) { step(is_group_b, i, half, block); });
            };
            Unroll<Steps::kStore>([&](auto i) { step(is_group_b, i, 0, blocks.begin); });
            load_queries();
            Unroll<4>(
                [&](auto i) { step(is_group_b, Constant<Steps::kLoad + i>{}, 0, blocks.begin); });
            copy(0, blocks.begin + 1);
            Barrier();
            if constexpr (is_group_b) {
                copy(kBytes, blocks.begin + 2);
                Barrier();  // half a K block behind from here on
            }

            const auto fragment = [&](int f) {
                return *reinterpret_cast<const Half8*>(lds + half + v_read +
                                                       f * kWaveSize * kChunkBytes);
            };
            // Stored in a period: K of the block after the next one, or V of the next one.
            const auto to_half = [&] { return is_group_b ? half : half ^ kBytes; };
            const auto to_find = [&] { return block + (is_group_b ? 3 : 2); };
            constexpr int kPv = kPvSlots<L, kColumns, kKeys>;
            constexpr int kSlots = kPv + kQkSlots<L, kDim, kKeys>;
            static_assert(Steps::At(2 * (Steps::kStore - 1), kSlots, kPv) == Steps::kStore - 1);
            const auto beside = [&](auto slot) {
                constexpr int i = Steps::At(slot, kSlots, kPv);
                if constexpr (i >= 0) step(is_group_b, Constant<i>{}, to_half(), to_find());
            };
            const auto softmax = [&] {
                if (ScalarHere(cap)) {
                    Seldom();
                    CapScores(p, factors, scores);
                }
                if (!mine.Full(block)) {
                    Seldom();
                    MaskUnseen(p, request, rows, first_row, block, scores);
                }
                Softmax<Number>(
                    scores, kKeys, 0, c, me.across, no_vote, stats, out, probs, [&](auto part) {
                        constexpr int kFirst = kEarlyV - kVAhead / 2;
                        StartPv<L, kTiles, kKeys, part ? kFirst : 0, part ? kEarlyV : kFirst>(
                            fragment, v_ring);
                    });
            };
            const auto pv = [&](auto beside, auto next) {
                if constexpr (kFew) StartPv<L, kTiles, kKeys, kEarlyV, kVAhead>(fragment, v_ring);
                PvFrom<Number>(fragment, probs, v_ring, out, beside, next);
            };
            // A period with nothing to compute for this wave.
            const auto idle = [&] {
                Barrier();
                Barrier();
                copy(to_half(), to_find());
                half ^= kBytes;
                ++block;
            };

            while (block < mine.begin) idle();
            if (block < mine.end) {
                StartQk<L, kDim, kTiles>(lds + half, k_read, k_ring);
                Qk<Number>(lds + half, k_read, queries, k_ring, scores, [](auto) {});
                while (block + 1 < mine.end) {
                    Barrier();
                    softmax();
                    Barrier();
                    Priority<1>();
                    const char* k_next = lds + (kFew ? 0 : half ^ kBytes);
                    uint32_t k_at = k_read;
                    if constexpr (kFew) {
                        k_at += half ^ kBytes;
                        Pin(k_at);
                    }
                    const auto start_qk = [&](auto i) {
                        constexpr int f = i - (kVAhead - kKRing);
                        if constexpr (f >= 0)
                            k_ring[f] = KFragment<L, kDim, kTiles>(k_next, k_at, f);
                    };
                    pv(beside, start_qk);
                    Qk<Number>(k_next, k_at, queries, k_ring, scores,
                               [&](auto slot) { beside(Constant<slot + kPv>{}); });
                    Priority<0>();
                    half ^= kBytes;
                    ++block;
                }
                Barrier();
                softmax();
                Barrier();
                pv([](auto) {}, [](auto) {});
                if (block + 1 < blocks.end) copy(to_half(), to_find());
                half ^= kBytes;
                ++block;
            }
            while (block < blocks.end) idle();
            if constexpr (!is_group_b) Barrier();  // as many barriers as group B
        };
        if (group_b)
            attend(Constant<true>{});
        else
            attend(Constant<false>{});
    }
    if (part_index >= 0)
        StorePackedPart<Cache, kDim>(ArgumentAgain<RaggedParams>(), part_index, rows, first_row,
                                     me.Again(), stats, out);
    else
        StorePackedRows<Number, Cache, kDim>(ArgumentAgain<RaggedParams>(), request,
                                             kv_head * group, rows, first_row, c, me.Again(), stats,
                                             out);
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_ATTENTION_PREFILL(name, Number, kDim, Cache)                          \
    LITE_KERNEL(kDenseThreads, kTwoFit<kDim> ? 4 : 2) name(const RaggedParams p) { \
        AttentionPrefill<Number, kDim, Cache<Number>>(p);                          \
    }
#include "variants.def"
