// Geometry of the gfx942 kernels: the one place where these numbers stand. Kernels, host launcher
// and tests read them from here. Plain C++20, no HIP; constexpr functions run on either side.
#pragma once

#include <stdint.h>

namespace liteattention::gfx942 {

inline constexpr int kWaveSize = 64;
inline constexpr int kXcds = 8;              // compute dies of an MI300X; workgroup w runs on w % 8
inline constexpr int kComputeUnits = 304;    // one dense workgroup fills one
inline constexpr int kLdsBytes = 64 * 1024;  // of one compute unit

// Tile of the attention kernels: one workgroup computes kQBlock query rows against K blocks.
inline constexpr int kKBlock = 64;                  // keys in one K block, the unit of skipping
inline constexpr int kWaveRows = 32;                // query rows of one wave: one MFMA tile
inline constexpr int kWaves = 8;                    // two groups of four, half a K block apart
inline constexpr int kQBlock = kWaves * kWaveRows;  // 256
inline constexpr int kDenseThreads = kWaves * kWaveSize;

inline constexpr int kTransposeThreads = 256;  // one workgroup per (batch, kv head, K block)
inline constexpr int kMergeThreads = 256;      // a thread merges 8 neighbouring outputs of a row
inline constexpr int kMergeVector = 8;
inline constexpr int kPlanThreads = 256;          // one tile each
inline constexpr int kSelectThreads = kWaveSize;  // a wave chooses for a q block

// A softmax mass of 1 as a tile's weight (docs/budget.md). Waves add up finer parts of it, each
// rounded up, so that eight roundings together are less than one of the weight.
inline constexpr uint32_t kMassUnit = 1u << 24;
inline constexpr uint32_t kMassParts = 16;
inline constexpr uint32_t kMassWhole = kMassUnit * kMassParts;

// A tile of which any row has a larger share weighs 1. A wave that has such a row adds kMassWhole
// to the tile's weight, of which it then counts one part less than kMassWhole at most.
inline constexpr float kRowGuard = 0.25f;
static_assert(kWaves * (2 * uint64_t{kMassWhole} - 1) < uint64_t{1} << 32);

// Every row of q, k, v and out must start on this boundary: rows travel as whole dwords.
inline constexpr int kRowAlignBytes = 4;

// Keys may lie this many elements apart: within a K block the kernels count bytes in 32 bits. Every
// other stride is limited by memory only.
inline constexpr int64_t kMaxKRowStride = int64_t{1} << 25;

// Pages, and rows of a page, may lie this many elements apart, less than 4 GiB: number and distance
// are multiplied as 32-bit numbers into a 64-bit offset.
inline constexpr int64_t kMaxPageStride = (int64_t{1} << 31) - 128;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t QBlocks(int64_t q_len) { return CeilDiv(q_len, kQBlock); }
constexpr int64_t KBlocks(int64_t kv_len) { return CeilDiv(kv_len, kKBlock); }
constexpr int64_t SkipWords(int64_t kv_len) { return CeilDiv(KBlocks(kv_len), 32); }

// In which order workgroups take tiles; see TileOf. The numbers are part of kernel arguments.
enum class Mapping : int32_t {
    kSwizzledHeadFirst = 0,
    kNaiveHeadFirst = 1,
    kSwizzledBlockFirst = 2,
    kNaiveBlockFirst = 3,
};

// Tiles of a call: one per (batch, q head, q block), q block fastest.
constexpr int64_t Tiles(int64_t batch, int64_t q_heads, int64_t q_len) {
    return batch * q_heads * QBlocks(q_len);
}

// The work item of workgroup `id` of `count`, such that each XCD works through one contiguous run
// of items. Hardware deals workgroups to XCDs round robin. A bijection of [0, count) for every
// count.
constexpr uint32_t XcdContiguous(uint32_t id, uint32_t count) {
    const uint32_t xcd = id % kXcds, full = count / kXcds, rest = count % kXcds;
    return xcd * full + (xcd < rest ? xcd : rest) + id / kXcds;
}

// The tile (q block fastest, then head, then batch) at `position` of the launch order, of `rows` =
// batch * q_heads rows of q_blocks. Workgroup w, on XCD w % 8, takes position w. A bijection of
// [0, rows * q_blocks) for every mapping and size. The four mappings of
// "Optimizing Attention on GPUs by Exploiting GPU Architectural NUMA Effects":
//
//   naive head-first      all q blocks of a head, then the next head: each head on all XCDs
//   swizzled head-first   an XCD takes one head after the other: the tiles that read the same K
//                         and V, those of one (batch, kv head), meet in one L2. Exactly so where
//                         batch * kv_heads is a multiple of 8; otherwise the runs still have equal
//                         lengths, and a run begins or ends within a head (7 seams at most).
//   naive block-first     q block 0 of all heads, then q block 1: every XCD reads many heads
//   swizzled block-first  likewise, but an XCD takes neighbouring heads, as far as `rows` is a
//                         multiple of 8
constexpr uint32_t TileOf(Mapping mapping, uint32_t position, uint32_t rows, uint32_t q_blocks) {
    if (mapping == Mapping::kSwizzledHeadFirst) return XcdContiguous(position, rows * q_blocks);
    if (mapping == Mapping::kNaiveHeadFirst) return position;
    const uint32_t row = position % rows, q_block = position / rows;
    return (mapping == Mapping::kNaiveBlockFirst ? row : XcdContiguous(row, rows)) * q_blocks +
           q_block;
}

// LiteAttention's tiles differ in length, so plan_lpt or pack_lists deals them. Workgroup w, on XCD
// w % 8, takes the tile at position w of its order; some positions have none, as an XCD whose tiles
// are short has more of them than another. There are half as many positions again as tiles: the
// uneven lists of docs/model.md need up to 1.2 times as many.
constexpr int64_t LiteSlots(int64_t tiles) { return CeilDiv(tiles, kXcds) * 3 / 2; }
// Room for the tiles' counts, which are read eight at a time.
constexpr int64_t CountWords(int64_t tiles) { return CeilDiv(tiles, 8) * 8; }
// What a tile takes beside its K blocks, in their time (docs/model.md: 2.6).
inline constexpr int kTileBlocks = 3;
// By how many bits work is shifted before it is added up, so that eight times all of it fits into
// 32 bits: 0 up to 536 million K blocks of all tiles together.
constexpr int32_t WorkShift(int64_t tiles, int64_t k_blocks) {
    int32_t shift = 0;
    while (tiles * (((k_blocks + kTileBlocks - 1) >> shift) + 1) >= (int64_t{1} << 32) / kXcds)
        ++shift;
    return shift;
}
// Tiles at the end of an XCD's run that are ordered whatever their heads, for each compute unit.
inline constexpr int kTogether = 4;

// pack_lists: a workgroup has the tiles of an XCD, at most kPackTiles, and packs the last of them,
// kPackAtEnd for each compute unit. A unit is a lane; the last lane is none, it gets what does not
// fit. With more than 4,096 tiles the last round is too short to be worth it: plan_lpt, as on parts
// of an MI300X, where several runs share an XCD.
inline constexpr int kPackThreads = 512, kPackTiles = 768, kPackAtEnd = 3;
constexpr bool PacksLists(int64_t tiles, int64_t compute_units) {
    return compute_units == kComputeUnits && LiteSlots(tiles) <= kPackTiles;
}
static_assert(CeilDiv(kComputeUnits, kXcds) < kWaveSize);
// The room that try `number` gives each unit: 129/128, 130/128 ... of an equal share of the work.
constexpr uint32_t PackRoom(uint32_t share, uint32_t number) {
    return share + (share + 127) / 128 * (number + 1);
}

// Lists cut along the keys, where pack_lists deals the tiles of a step with a budget. An XCD's run
// becomes a line of work, tile after tile, and each of its units gets an equal stretch of it: the
// list at its end goes on in the next unit. Method: R. McNaughton, Management Science 6 (1959).
// Parts have kLeastPart K blocks or more, so a stretch may end that much later, and kLeastStretch
// bounds the parts of very few lists.
//
// A run is cut only if that ends kCutCost K blocks earlier: a late stretch and a second start are
// up to 11, and storing parts and merging them costs about as much at D = 128 if every unit cuts a
// list (80 MB written and read at 4 TB/s, and a launch).
inline constexpr int kLeastPart = 8, kLeastStretch = 16 + kTileBlocks, kCutCost = 22;
// Lists of fewer K blocks stay whole: the launches that an order and a merge take would cost more.
inline constexpr int kLeastCutList = 64;
// A unit has two parts at most: that of a list which began in another unit, and that of a list
// which goes on in the next one.
inline constexpr int kListParts = 2 * kComputeUnits;
// Where part `part` of a list stands that begins in unit `unit`: the first behind what that unit
// has of another list.
constexpr int32_t ListSlot(int32_t unit, int32_t part) {
    return 2 * (unit + part) + (part == 0 ? 1 : 0);
}
// Positions of an XCD if lists are cut: each unit may have one part more than it begins lists. Of
// few tiles an XCD may have three times as many as it would have of equal ones. Of many it may not:
// a workgroup without a tile waits for a free unit, too.
constexpr int64_t CutSlots(int64_t tiles) {
    const int64_t slots = LiteSlots(tiles);
    return slots + (slots < 64 ? slots : 64) + kComputeUnits / kXcds;
}
// K blocks 0 .. (this) - 1 of a list of `blocks` belong to the units before border `border` of the
// line, if the list begins at `start`; starting it takes kTileBlocks.
constexpr int32_t CutAt(int64_t border, int64_t start, int32_t blocks) {
    const int64_t before = border - start - kTileBlocks;
    if (before < kLeastPart) return 0;
    return blocks - before < kLeastPart ? blocks : static_cast<int32_t>(before);
}

// A tail tile and one of its parts. Workgroups 0.. of the tail take them such that a part runs on
// the XCD of its tile's position; a bijection to [0, tail_tiles) x [0, splits).
struct TailPart {
    uint32_t tile, part;
};
constexpr TailPart TailPartOf(uint32_t id, uint32_t tail_tiles, uint32_t splits) {
    const uint32_t eights = tail_tiles / kXcds * kXcds, rest = tail_tiles - eights;
    if (id < eights * splits) {
        const uint32_t run = kXcds * splits;
        return {id / run * kXcds + id % kXcds, id % run / kXcds};
    }
    id -= eights * splits;
    return {eights + id % rest, id / rest};
}

// K blocks [PartBegin(g), PartBegin(g + 1)) belong to part g of `splits`: sizes differ by one at
// most, and no part is empty while splits <= k_blocks.
constexpr int32_t PartBegin(int32_t part, int32_t splits, int32_t k_blocks) {
    const int32_t size = k_blocks / splits, larger = k_blocks % splits;
    return part * size + (part < larger ? part : larger);
}

// ---- ragged batches: requests of different lengths, keys through a page table ----------------

// Query heads that share a key head stand side by side in the rows of a tile, so that keys are read
// once for all of them: row x of (request, kv head) is query x / group of the request, head
// x % group of the group. A request of few such rows fits into one MFMA tile and is
// attention_decode's; every other one is attention_prefill's. Both kernels are launched over the
// whole batch and each leaves the other's requests alone, so a mixed batch needs no sorting.
inline constexpr int kDecodeRows = 16;
constexpr bool IsDecode(int64_t q_len, int64_t group) { return q_len * group <= kDecodeRows; }

// Head dims of ragged batches: multiples of 16. Rows in LDS have the next of 64, 128 and 256, and
// products run over the next multiple of 32, 64 at least (scores at D = 112 and 32 over their own);
// what lies past a head's own dims is zero or not used.
constexpr bool IsRaggedDim(int64_t dim) {
    return dim == 32 || dim == 64 || dim == 80 || dim == 96 || dim == 112 || dim == 128 ||
           dim == 192 || dim == 256;
}
constexpr int LdsDims(int dim) { return dim > 128 ? 256 : dim > 64 ? 128 : 64; }
constexpr int ProductDims(int dim) { return dim < 64 ? 64 : (dim + 31) / 32 * 32; }

// Rows of one workgroup of attention_prefill, and keys in one of its K blocks: 8 waves of 32 rows,
// 16 from D = 192 on, where the outputs of 32 would not fit into registers.
constexpr int PrefillRows(int head_dim) { return head_dim > 128 ? 128 : 256; }
constexpr int PrefillKeys(int head_dim) { return head_dim > 128 ? 32 : 64; }
// Rows and columns of its MFMA tiles: 32 where a wave has as many rows and outputs are an even
// number of such tiles, between which products alternate.
constexpr int PrefillTileRows(int head_dim) {
    return head_dim <= 128 && ProductDims(head_dim) % 64 == 0 ? 32 : 16;
}

// Tiles of prefill rows are numbered within a kv head such that request r begins at a number that
// depends on q_start[r] alone: no running sum, no host. Numbers that no tile takes end at once.
constexpr int64_t PrefillBegin(int64_t q_start, int64_t request, int64_t group, int64_t tile_rows) {
    return q_start * group / tile_rows + request;
}

// Keys of a request, its window, its lookahead and rows * group are smaller than this: positions
// are computed in 32 bits.
inline constexpr int64_t kMaxRaggedLength = int64_t{1} << 30;
inline constexpr int64_t kSeesAll = kMaxRaggedLength - 1;  // a lookahead that hides no key

// The tile of workgroup `id`: kv heads as far apart on the XCDs as their number allows (each XCD
// has heads of its own where it is a multiple of 8), one head after the other, and within a head
// the last tiles first, which see the most keys where attention is causal. A bijection of
// [0, slots * kv_heads).
struct PrefillTile {
    uint32_t kv_head, slot;
};
constexpr PrefillTile PrefillTileOf(uint32_t id, uint32_t slots, uint32_t kv_heads) {
    const uint32_t lowest = kv_heads & (~kv_heads + 1), sets = lowest < kXcds ? lowest : kXcds;
    const uint32_t position = id / sets;
    return {id % sets + sets * (position / slots), slots - 1 - position % slots};
}

// Parts along the keys that a tile may have where a key head has `tiles` tiles: such that all find
// room, which the host gives, and `splits` at most.
constexpr int32_t PrefillSplitsOf(int32_t tiles, int32_t room, int32_t splits) {
    if (splits * tiles <= room) return splits;
    return room > tiles ? room / tiles : 1;
}
// Parts that a tile of `blocks` K blocks has: of `part_blocks` blocks each, or longer where they
// would be more than `splits`. Part g has blocks [PartBegin(g), PartBegin(g + 1)) of the tile's.
// Shorter tiles have fewer parts; workgroups left over end at once.
constexpr int32_t PrefillPartsOf(int32_t blocks, int32_t part_blocks, int32_t splits) {
    if (splits <= 1 || blocks <= part_blocks) return 1;
    const int32_t parts = (blocks + part_blocks - 1) / part_blocks;
    return parts < splits ? parts : splits;
}

// Threads of a workgroup of merge_prefill and merge_decode; each merges 8 neighbouring outputs of a
// row.
inline constexpr int kMergeRaggedThreads = 256;

// Division by a number that the host knows, without a division: n / size = ((2 n multiplier) >> 32)
// >> shift for every n < 2^31. Keys by the page size, rows by the group, tiles by the
// q blocks and heads. Packed keys are one page without end: multiplier 0.
struct Divider {
    uint32_t multiplier, shift;
};
constexpr Divider DividerOf(int32_t size) {
    if (size <= 0) return {0, 0};
    uint32_t shift = 0;
    while ((uint64_t{1} << shift) < static_cast<uint64_t>(size)) ++shift;
    const uint64_t power = uint64_t{1} << (31 + shift), divisor = static_cast<uint64_t>(size);
    return {static_cast<uint32_t>((power + divisor - 1) / divisor), shift};
}
constexpr uint32_t Divide(uint32_t n, Divider divider) {
    const uint64_t product = static_cast<uint64_t>(n * 2u) * divider.multiplier;
    return static_cast<uint32_t>(product >> 32) >> divider.shift;
}

// ---- decode ------------------------------------------------------------------------------------

inline constexpr int kDecodeWaves = 4;
inline constexpr int kDecodeThreads = kDecodeWaves * kWaveSize;
inline constexpr int kWriteKvThreads = 256;  // a thread copies 8 elements of k and 8 of v

// Keys of one wave's step, the unit in which a request is split: their K and V are 64 registers at
// D = 64 and 256, 56 at 192, 104 to 128 between.
constexpr int DecodeKeys(int64_t head_dim) { return head_dim > 128 ? 16 : 64; }

// What a decode request reads: `blocks` blocks of DecodeKeys keys from key `first` on, those that
// some row of it sees, and in how many parts. A part is a workgroup's: with fewer blocks than waves
// waves would idle, so short requests of a ragged batch take fewer parts than the launch has room
// for; the workgroups left over end at once. Part g has blocks [PartBegin(g), PartBegin(g + 1)).
struct DecodeWork {
    int32_t first, blocks, parts;
};
constexpr DecodeWork DecodeWorkOf(int32_t q_len, int32_t kv_len, int32_t window, int32_t splits,
                                  int32_t keys) {
    const int32_t lowest = kv_len - q_len - window + 1;  // what the first row sees
    const int32_t first = window > 0 && lowest > 0 ? lowest : 0;
    const int32_t blocks = kv_len > first ? (kv_len - first + keys - 1) / keys : 0;
    const int32_t most = (blocks + kDecodeWaves - 1) / kDecodeWaves;
    const int32_t parts = most < splits ? most : splits;
    return {first, blocks, parts > 1 ? parts : 1};
}

}  // namespace liteattention::gfx942
