// Replays the products of the kernels through csrc/gfx942/mfma_layout.h on the host: copies K
// to a model of LDS, reads operands lane by lane, multiplies with the MFMA's documented operand
// layout, and compares with the plain product. Integers, so every comparison is exact. Prints one
// line per failure and returns their number.

#include <cstdio>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "mfma_layout.h"
#include "params.h"

using namespace liteattention::gfx942;

namespace {

int failures = 0;

void Expect(bool ok, const char* what, long a = 0, long b = 0, long c = 0) {
    if (ok) return;
    if (++failures <= 20) std::printf("%s (%ld, %ld, %ld)\n", what, a, b, c);
}

// What one lane holds of one operand (4 elements) and of one accumulator of an MFMA.
struct Operand {
    long element[64][4];
};
template <int kTile>
struct Accumulator {
    long element[64][kTile * kTile / 64];
};

// D += A B by the layout of v_mfma_f32_16x16x16 and v_mfma_f32_32x32x8, written here independently
// of mfma_layout.h. 16: A[m][k] in lane m + 16 (k / 4), B[k][n] in lane n + 16 (k / 4), D[m][n] in
// lane n + 16 (m / 4). 32: A[m][k] in lane m + 32 (k / 4), B[k][n] in lane n + 32 (k / 4), D[m][n]
// in lane n + 32 (m / 4 % 2), register 4 (m / 8) + m % 4.
template <int kTile>
void Mfma(const Operand& a, const Operand& b, Accumulator<kTile>& d) {
    constexpr int kDepth = kTile == 16 ? 16 : 8, kGroups = 64 / kTile;
    for (int m = 0; m < kTile; ++m)
        for (int n = 0; n < kTile; ++n)
            for (int k = 0; k < kDepth; ++k)
                d.element[n + kTile * (m / 4 % kGroups)][4 * (m / 4 / kGroups) + m % 4] +=
                    a.element[m + kTile * (k / 4)][k % 4] * b.element[n + kTile * (k / 4)][k % 4];
}

long Pseudo(long x) {
    x = x * 6364136223846793005L + 1442695040888963407L;
    return (x >> 33) % 17 - 8;
}

// The products of a wave with kQTiles q tiles.
template <class L, int kDim, int kQTiles>
void Replay() {
    constexpr int kTile = L::kTile, kWaveRows = kQTiles * kTile, kKeyTiles = kKBlock / kTile;
    constexpr int kSteps = kDim / (2 * L::kDepth), kOperands = kKBlock / L::kDepth;
    std::vector<long> q(kWaveRows * kDim), k(kKBlock * kDim), v(kKBlock * kDim);
    for (size_t i = 0; i < q.size(); ++i) q[i] = Pseudo(static_cast<long>(i) + 1);
    for (size_t i = 0; i < k.size(); ++i) k[i] = Pseudo(static_cast<long>(i) + 100003);
    for (size_t i = 0; i < v.size(); ++i) v[i] = Pseudo(static_cast<long>(i) + 200003);

    // K to LDS: element (2 bytes) by element, -1 where nothing was written.
    std::vector<long> lds(kKBlock * kDim, -1000);
    const int rows = KCopyRows(kDim);
    for (int copy = 0; copy < kKBlock / rows; ++copy)
        for (int lane = 0; lane < kWaveSize; ++lane) {
            const int row = copy * rows + KCopyRow(kDim, lane);
            const int byte = KCopyByte(kDim, row, lane);
            const int to = (copy * rows * kDim * 2 + lane * 4) / 2;
            for (int half = 0; half < 2; ++half)
                lds[static_cast<size_t>(to + half)] =
                    k[static_cast<size_t>(row * kDim + byte / 2 + half)];
        }

    // Banks: 8 neighbouring lanes of a 16-byte read take 128 different bytes of the 32 banks.
    for (int tile = 0; tile < kKeyTiles; ++tile)
        for (int step = 0; step < kSteps; ++step) {
            for (int lane = 0; lane < kWaveSize; lane += 8) {
                std::set<int> slots;
                for (int i = 0; i < 8; ++i)
                    slots.insert(KReadByte<L>(kDim, tile, step, lane + i) % 128 / 16);
                Expect(slots.size() == 8, "bank conflict", tile, step, lane);
            }
            for (int lane = 0; lane < kWaveSize; ++lane) {
                const int base = KReadByte<L>(kDim, 0, 0, lane), chunk = 16 * L::kGroups * step;
                const int split = (base ^ chunk % 128) + chunk / 128 * 128;
                Expect(split + tile * kTile * kDim * 2 == KReadByte<L>(kDim, tile, step, lane),
                       "the read address does not split into base and immediate", tile, step, lane);
            }
        }

    // S^T = K Q^T.
    std::vector<Accumulator<kTile>> scores(kKeyTiles * kQTiles, Accumulator<kTile>{});
    for (int t = 0; t < kKeyTiles; ++t)
        for (int x = 0; x < kQTiles; ++x)
            for (int s = 0; s < kSteps; ++s)
                for (int half = 0; half < 2; ++half) {
                    Operand a{}, b{};
                    for (int lane = 0; lane < kWaveSize; ++lane)
                        for (int e = 0; e < 4; ++e) {
                            const int at = KReadByte<L>(kDim, t, s, lane) / 2 + 4 * half + e;
                            a.element[lane][e] = lds[static_cast<size_t>(at)];
                            const int row = kTile * x + L::Col(lane);
                            const int dim = L::QkDim(s, lane, 4 * half + e);
                            b.element[lane][e] = q[static_cast<size_t>(row * kDim + dim)];
                        }
                    Mfma(a, b, scores[static_cast<size_t>(t * kQTiles + x)]);
                }
    std::vector<long> exact(kKBlock * kWaveRows);
    for (int key = 0; key < kKBlock; ++key)
        for (int row = 0; row < kWaveRows; ++row)
            for (int d = 0; d < kDim; ++d)
                exact[static_cast<size_t>(key * kWaveRows + row)] +=
                    k[static_cast<size_t>(key * kDim + d)] * q[static_cast<size_t>(row * kDim + d)];
    for (int t = 0; t < kKeyTiles; ++t)
        for (int x = 0; x < kQTiles; ++x)
            for (int lane = 0; lane < kWaveSize; ++lane)
                for (int i = 0; i < L::kRegisters; ++i) {
                    const int key = L::ScoreKey(t, lane, i), row = kTile * x + L::Col(lane);
                    Expect(scores[static_cast<size_t>(t * kQTiles + x)].element[lane][i] ==
                               exact[static_cast<size_t>(key * kWaveRows + row)],
                           "score", key, row, t);
                }

    // V_t: every element once, and each lane's 16 bytes hold what the map says.
    std::vector<long> packed(kKBlock * kDim, -1000);
    for (int t = 0; t < kDim / kTile; ++t)
        for (int pair = 0; pair < kVtPairs<L>; ++pair)
            for (int lane = 0; lane < kWaveSize; ++lane)
                for (int e = 0; e < 8; ++e) {
                    const size_t at = static_cast<size_t>(VtElement<L>(t, pair, lane, e));
                    Expect(packed[at] == -1000, "V_t element written twice", t, pair, lane);
                    packed[at] =
                        v[static_cast<size_t>(VtKey<L>(pair, lane, e) * kDim + VtDim<L>(t, lane))];
                }

    // O^T = V^T P^T, with the scores as probabilities, exactly where they stand: operand j of a
    // column are registers 4 (j % kRuns) and on of key tile j / kRuns.
    for (int t = 0; t < kDim / kTile; ++t)
        for (int x = 0; x < kQTiles; ++x) {
            Accumulator<kTile> out{};
            for (int j = 0; j < kOperands; ++j) {
                Operand a{}, b{};
                const auto& tile = scores[static_cast<size_t>(j / L::kRuns * kQTiles + x)];
                for (int lane = 0; lane < kWaveSize; ++lane)
                    for (int e = 0; e < 4; ++e) {
                        a.element[lane][e] = packed[static_cast<size_t>(
                            VtElement<L>(t, j / 2, lane, 4 * (j % 2) + e))];
                        b.element[lane][e] = tile.element[lane][4 * (j % L::kRuns) + e];
                    }
                Mfma(a, b, out);
            }
            for (int lane = 0; lane < kWaveSize; ++lane)
                for (int i = 0; i < L::kRegisters; ++i) {
                    const int dim = L::RunDim(t * L::kRuns + i / 4, lane) + i % 4;
                    const int row = kTile * x + L::Col(lane);
                    long sum = 0;
                    for (int key = 0; key < kKBlock; ++key)
                        sum += exact[static_cast<size_t>(key * kWaveRows + row)] *
                               v[static_cast<size_t>(key * kDim + dim)];
                    Expect(out.element[lane][i] == sum, "output", row, dim, t);
                }
        }
    std::set<int> dims;
    for (int t = 0; t < kDim / kTile; ++t)
        for (int row = 0; row < kTile; ++row) dims.insert(L::OutDim(t, row));
    Expect(dims.size() == kDim && *dims.begin() == 0 && *dims.rbegin() == kDim - 1,
           "not every head dim is computed once", static_cast<long>(dims.size()));
    // Two neighbouring runs of a lane are 8 neighbouring head dims.
    for (int u = 0; u < kDim / L::kDepth / 2; ++u)
        for (int lane = 0; lane < kWaveSize; lane += kTile)
            Expect(L::RunDim(2 * u + 1, lane) == L::RunDim(2 * u, lane) + 4 &&
                       L::RunDim(2 * u, lane) % 8 == 0,
                   "outputs of a lane are not neighbours", u, lane);
}

void Geometry() {
    for (uint32_t count : {1u, 7u, 8u, 9u, 303u, 304u, 305u, 1000u}) {
        std::vector<int> seen(count);
        for (uint32_t id = 0; id < count; ++id) {
            const uint32_t item = XcdContiguous(id, count);
            Expect(item < count && !seen[item]++, "not a bijection", id, count);
            if (id >= kXcds)
                Expect(item == XcdContiguous(id - kXcds, count) + 1, "XCD run broken", id, count);
        }
    }
    for (int blocks = 1; blocks < 70; ++blocks)
        for (int splits = 1; splits <= blocks; ++splits) {
            Expect(PartBegin(0, splits, blocks) == 0, "first part", blocks, splits);
            Expect(PartBegin(splits, splits, blocks) == blocks, "last part", blocks, splits);
            for (int g = 0; g < splits; ++g) {
                const int size = PartBegin(g + 1, splits, blocks) - PartBegin(g, splits, blocks);
                Expect(size >= 1 && size <= (blocks + splits - 1) / splits, "part size", blocks,
                       splits, g);
            }
        }
}

constexpr Mapping kMappings[] = {Mapping::kSwizzledHeadFirst, Mapping::kNaiveHeadFirst,
                                 Mapping::kSwizzledBlockFirst, Mapping::kNaiveBlockFirst};

// One launch of batch x q_heads x q_blocks tiles; workgroup w runs on XCD w % 8.
void CheckMapping(Mapping mapping, uint32_t batch, uint32_t kv_heads, uint32_t group,
                  uint32_t q_blocks) {
    const uint32_t rows = batch * kv_heads * group, tiles = rows * q_blocks;
    const long what = static_cast<long>(mapping);
    std::vector<int> seen(tiles);
    std::vector<std::set<uint32_t>> xcds(batch * kv_heads);  // that a K and V is read on
    for (uint32_t id = 0; id < tiles; ++id) {
        const uint32_t tile = TileOf(mapping, id, rows, q_blocks);
        Expect(tile < tiles && !seen[tile]++, "mapping: not a bijection", what, id, tiles);
        if (tile < tiles) xcds[tile / q_blocks / group].insert(id % kXcds);
        const uint32_t next = id + 1 < tiles ? TileOf(mapping, id + 1, rows, q_blocks) : 0;
        if (mapping == Mapping::kNaiveHeadFirst && id + 1 < tiles)
            Expect(next == tile + 1, "naive head-first: not along a head", id, tiles);
        if (mapping == Mapping::kNaiveBlockFirst && id + 1 < tiles)
            Expect(next / q_blocks == (tile / q_blocks + 1) % rows,
                   "naive block-first: not along the heads", id, tiles);
        const bool block_first =
            mapping == Mapping::kNaiveBlockFirst || mapping == Mapping::kSwizzledBlockFirst;
        if (block_first) Expect(tile % q_blocks == id / rows, "block-first: block", id, tiles);
        // An XCD's next tile is the one beside: it stays with a head until the head is done.
        if (mapping == Mapping::kSwizzledHeadFirst && id + kXcds < tiles)
            Expect(TileOf(mapping, id + kXcds, rows, q_blocks) == tile + 1,
                   "swizzled head-first: an XCD leaves its head", id, tiles);
    }
    const bool even = batch * kv_heads % kXcds == 0;
    if (even && mapping == Mapping::kSwizzledHeadFirst)
        for (const auto& of : xcds) Expect(of.size() == 1, "a group on several XCDs", rows, tiles);
    // 7 seams between 8 runs: at most 7 further (XCD, K and V) pairs, unless there is less than
    // one group per XCD.
    size_t pairs = 0;
    for (const auto& of : xcds) pairs += of.size();
    if (mapping == Mapping::kSwizzledHeadFirst)
        Expect(pairs <= xcds.size() + kXcds - 1, "more than 7 seams", static_cast<long>(pairs));
    if (mapping == Mapping::kSwizzledBlockFirst && even)
        for (const auto& of : xcds) Expect(of.size() == 1, "block-first: a group on several XCDs");
}

void Mappings() {
    for (Mapping mapping : kMappings) {
        for (uint32_t batch = 1; batch <= 3; ++batch)
            for (uint32_t kv_heads = 1; kv_heads <= 10; ++kv_heads)
                for (uint32_t group : {1u, 2u, 3u, 5u, 8u})
                    for (uint32_t q_blocks : {1u, 2u, 3u, 7u, 8u, 9u, 20u})
                        CheckMapping(mapping, batch, kv_heads, group, q_blocks);
        CheckMapping(mapping, 1, 40, 1, 197);  // 75,600 rows
        CheckMapping(mapping, 8, 8, 16, 342);  // 128k rows
    }
    for (uint32_t tail : {1u, 2u, 7u, 8u, 9u, 16u, 30u, 151u, 303u})
        for (uint32_t splits : {1u, 2u, 3u, 8u, 10u}) {
            std::set<std::pair<uint32_t, uint32_t>> seen;
            for (uint32_t id = 0; id < tail * splits; ++id) {
                const TailPart part = TailPartOf(id, tail, splits);
                Expect(part.tile < tail && part.part < splits &&
                           seen.insert({part.tile, part.part}).second,
                       "tail: not a bijection", id, tail, splits);
                if (part.tile < tail / kXcds * kXcds)
                    Expect(part.tile % kXcds == id % kXcds, "tail: part on another XCD", id, tail,
                           splits);
            }
        }
}

// Sums of work, and room for all tiles.
void Orders() {
    const auto most = [](int64_t tiles, int64_t k_blocks, int32_t shift) {
        return static_cast<unsigned __int128>(kXcds) * tiles *
               (((k_blocks + kTileBlocks - 1) >> shift) + 1);
    };
    for (const int64_t tiles : {1l, 305l, 11840l, 1l << 20, 5592400l})
        for (const int64_t k_blocks : {1l, 1182l, 1l << 16, 1l << 20, (1l << 25) - 1}) {
            const int32_t shift = WorkShift(tiles, k_blocks);
            Expect(most(tiles, k_blocks, shift) < 1ul << 32, "work beyond 32 bits", tiles,
                   k_blocks);
            Expect(shift == 0 || most(tiles, k_blocks, shift - 1) >= 1ul << 32, "shifted too far",
                   tiles, k_blocks);
        }
    Expect(WorkShift(11840, 1182) == 0, "work of a video is shifted");
    for (int64_t tiles = 1; tiles < 3000; ++tiles)
        Expect(kXcds * LiteSlots(tiles) >= tiles && CountWords(tiles) >= tiles, "no room", tiles);
    // All tries of packing stay below what a lane has that is no unit, and with another tile's work
    // below 2^32.
    for (const uint32_t share : {0u, 1u, 127u, 128u, 1u << 20, (1u << 29) - 1}) {
        const uint32_t most_room = PackRoom(share, kPackThreads / kWaveSize - 2);
        Expect(PackRoom(share, 0) >= share && most_room >= share && most_room < 0x7fffffffu,
               "packed into too much", share);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "sizes")) {
        std::printf(
            "transpose_v %zu\nattention_dense %zu\nattention_lite %zu\nmerge_parts %zu\n"
            "plan_lpt %zu\npack_lists %zu\nattention_weigh %zu\nselect_tiles %zu\ncount_tiles "
            "%zu\nmerge_lists %zu\n",
            sizeof(TransposeVParams), sizeof(DenseParams), sizeof(LiteParams), sizeof(MergeParams),
            sizeof(PlanParams), sizeof(PlanParams), sizeof(WeighParams), sizeof(SelectParams),
            sizeof(CountParams), sizeof(MergeListsParams));
        for (const char* name :
             {"attention_prefill", "attention_decode", "merge_decode", "merge_prefill"})
            std::printf("%s %zu\n", name, sizeof(RaggedParams));
        std::printf("write_kv %zu\n", sizeof(WriteKvParams));
        return 0;
    }
    Replay<Layout32, 64, 1>();
    Replay<Layout32, 128, 1>();
    Replay<Layout16, 64, 2>();
    Replay<Layout16, 128, 2>();
    Geometry();
    Orders();
    Mappings();
    return failures != 0;
}
