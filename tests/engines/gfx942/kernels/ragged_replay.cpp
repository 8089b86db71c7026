// Replays on the host what the ragged kernels compute with: tile numbers, divisions, V in LDS.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "mfma_layout.h"
#include "params.h"

using namespace liteattention::gfx942;

namespace {

void Require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "not so: %s\n", what);
    std::exit(1);
}

// Every tile of every request has a number of its own below PrefillSlots, and the search for the
// last request that begins by a number finds its request.
void TileNumbers(std::mt19937& random) {
    for (int round = 0; round < 200; ++round) {
        const int requests = 1 + static_cast<int>(random() % 50);
        const int group = 1 + static_cast<int>(random() % 16), rows = round % 2 ? 256 : 128;
        std::vector<int64_t> start = {0};
        for (int r = 0; r < requests; ++r)
            start.push_back(start.back() + random() % (random() % 2 ? 700 : 3));
        const int64_t total = start.back() + static_cast<int64_t>(random() % 5);
        const int64_t slots = PrefillSlots(total, requests, group, rows == 256 ? 128 : 256);
        std::set<int64_t> taken;
        for (int r = 0; r < requests; ++r) {
            const int64_t begin = PrefillBegin(start[r], r, group, rows);
            Require(begin < PrefillBegin(start[r + 1], r + 1, group, rows), "numbers ascend");
            for (int64_t t = 0; t < CeilDiv((start[r + 1] - start[r]) * group, rows); ++t) {
                Require(taken.insert(begin + t).second, "a number is one tile's");
                Require(begin + t < slots, "the grid covers it");
                Require(
                    r + 1 == requests || PrefillBegin(start[r + 1], r + 1, group, rows) > begin + t,
                    "the next request begins later");
            }
        }
    }
}

// However many tiles there are, each has its parts, all of them a workgroup and, if they are more
// than one, room and a merge.
void PartsOfTiles() {
    for (const int32_t slots : {1, 2, 5, 64, 300})
        for (const int32_t room : {0, 1, 2, 7, 64, 200, 1216})
            for (const int32_t splits : {1, 2, 3, 14, 64})
                for (int32_t tiles = 0; tiles <= slots; ++tiles) {
                    const int32_t parts = PrefillSplitsOf(tiles, room, splits);
                    Require(parts >= 1 && parts <= splits, "from one to as many as asked");
                    Require(parts * tiles <= PrefillItems(slots, room), "a workgroup for each");
                    if (parts == 1 || tiles == 0) continue;
                    Require(parts * tiles <= room, "room for each");
                    Require(tiles <= MergePrefillTiles(slots, room), "a merge for each");
                    Require(parts == splits || (parts + 1) * tiles > room, "as many as find room");
                }
    for (int32_t blocks = 0; blocks < 70; ++blocks)
        for (int32_t part_blocks = 1; part_blocks < 70; ++part_blocks)
            for (const int32_t splits : {1, 2, 3, 14, 64}) {
                const int32_t parts = PrefillPartsOf(blocks, part_blocks, splits);
                Require(parts >= 1 && parts <= splits && (parts == 1 || parts <= blocks),
                        "no part is empty");
                const int32_t longest = PartBegin(1, parts, blocks);
                Require(parts == splits || longest <= part_blocks, "parts are short enough");
                Require(parts == 1 || (parts - 1) * part_blocks < blocks, "and no more than that");
            }
}

void WorkgroupsToTiles() {
    for (uint32_t heads : {1u, 2u, 3u, 4u, 6u, 8u, 10u, 12u, 16u, 40u})
        for (uint32_t slots : {1u, 2u, 7u, 8u, 65u}) {
            std::set<uint32_t> taken;
            for (uint32_t id = 0; id < heads * slots; ++id) {
                const PrefillTile tile = PrefillTileOf(id, slots, heads);
                Require(tile.kv_head < heads && tile.slot < slots, "a tile of the grid");
                Require(taken.insert(tile.kv_head * slots + tile.slot).second, "a bijection");
                if (heads % kXcds == 0)
                    Require(tile.kv_head % kXcds == id % kXcds, "a die has heads of its own");
            }
        }
}

void Divisions(std::mt19937& random) {
    std::vector<uint32_t> sizes = {1, 2, 3, 4, 5, 7, 15, 16, 17, 64, 100, 128, 255, 256, 1000003};
    for (int i = 0; i < 300; ++i) sizes.push_back(1 + random() % 5000);
    for (const uint32_t size : sizes) {
        const Divider divider = DividerOf(static_cast<int32_t>(size));
        std::vector<uint32_t> numbers = {0, 1, 0x7fffffffu, 0x7ffffffeu, 0x40000000u, 0x3fffffffu};
        for (int i = 0; i < 1000; ++i) {
            const uint32_t n = random() & 0x7fffffffu, multiple = n / size * size;
            numbers.insert(numbers.end(), {n, multiple, multiple ? multiple - 1 : 0});
        }
        for (const uint32_t n : numbers) Require(Divide(n, divider) == n / size, "n / size");
    }
    Require(Divide(0x7fffffffu, DividerOf(0)) == 0, "packed keys lie in page 0");
}

// Writers cover each byte of a block of V once, where the reader of that key and dim looks; a store
// of 16 lanes meets every bank once. The emulator counts conflicts of reads (test_prefill.py).
template <class L>
void ValuesInLds(int dim, int keys) {
    const int bytes = LdsDims(dim) * keys * 2;
    std::vector<int> key_at(bytes / 2, -1), dim_at(bytes / 2, -1);
    std::set<int> pieces;
    const int dims = PieceBytes(dim) / 2;
    for (int thread = 0; thread < kCopyThreads; ++thread) {
        const int piece = VCopyPiece(dim, thread), run = VCopyRun<L>(dim, thread);
        Require(piece < Pieces(dim) && 4 * run < keys, "a piece of the block");
        Require(pieces.insert(piece * keys + run).second, "a piece is one lane's");
        Require(KCopyPiece(dim, thread) < Pieces(dim) && 4 * KCopyRun(dim, thread) < keys,
                "a piece of K");
        for (int e = 0; e < dims; ++e) {
            const int at = VLdsByte<L>(keys, piece * dims + e, run);
            Require(at == (VLdsByte<L>(keys, piece * dims + e / 4 * 4, run) ^ (16 * (e % 4))),
                    "xor");
            for (int k = 0; k < 4; ++k) {
                Require(key_at[at / 2 + k] < 0, "a byte is written once");
                key_at[at / 2 + k] = 4 * run + k;
                dim_at[at / 2 + k] = piece * dims + e;
            }
        }
    }
    constexpr int kPairKeys = 2 * L::kDepth;
    for (int tile = 0; tile < ProductDims(dim) / L::kTile; ++tile)
        for (int pair = 0; pair < keys / kPairKeys; ++pair)
            for (int lane = 0; lane < 64; ++lane)
                for (int e = 0; e < 8; ++e) {
                    const int fragment = tile * (keys / kPairKeys) + pair;
                    const int at = (fragment * 1024 + VReadByte<L>(lane)) / 2 + e;
                    Require(key_at[at] == VtKey<L>(pair, lane, e), "the key an operand wants");
                    Require(dim_at[at] == VtDim<L>(tile, lane), "the head dim an operand wants");
                }
    for (int first = 0; first < kCopyThreads; first += 16)
        for (int e = 0; e < dims; ++e) {
            std::set<int> banks;
            for (int lane = first; lane < first + 16; ++lane)
                banks.insert(
                    VLdsByte<L>(keys, VCopyPiece(dim, lane) * dims + e, VCopyRun<L>(dim, lane)) /
                    8 % 16);
            Require(banks.size() == 16, "a store meets every bank once");
        }
}

}  // namespace

int main() {
    std::mt19937 random(0);
    TileNumbers(random);
    PartsOfTiles();
    WorkgroupsToTiles();
    Divisions(random);
    for (int dim = 1; dim <= 512; ++dim)
        if (IsRaggedDim(dim)) {
            if (PrefillTileRows(dim) == 32)
                ValuesInLds<Layout32>(dim, PrefillKeys(dim));
            else
                ValuesInLds<Layout16>(dim, PrefillKeys(dim));
        }
    std::puts("ok");
}
