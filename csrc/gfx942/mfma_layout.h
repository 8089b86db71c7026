// Which element of which matrix lies in which lane, register and byte. Plain constexpr functions:
// the kernels address with them and a host test replays whole products through them.
//
// Two instructions multiply: v_mfma_f32_32x32x8, which leaves the vector ALU 28 of its 32 clocks,
// and v_mfma_f32_16x16x16, where 32 rows are too many (attention_decode, and attention_prefill at
// some head dims: geometry.h, PrefillTileRows). With T = 32 or 16 rows, a wave of 64 lanes has G =
// 64 / T groups (halves or quads); group = lane / T, col = lane % T. D = A B + C:
//
//   A (T x 4 G)  row m = col                          k = 4 group + e   e = 0..3 in 2 VGPRs
//   B (4 G x T)  k = 4 group + e                      column n = col    likewise
//   C, D         row m = 4 G (i / 4) + 4 group + i % 4   column n = col    i = 0..T^2/64-1, a VGPR
//   each
//
// Scores are computed as S^T = K Q^T, so a lane holds 64 / G keys of each 64 for ONE query (its
// column): maxima and sums run down registers, and log2(G) exchanges across the groups finish them.
// The D layout of S^T is the B layout of P^T, so O^T = V^T P^T takes the probabilities where they
// stand.
//
// Two orders are free and are spent on 16-byte accesses:
//  - the contraction over d: both operands may take it in any order, so a lane's two consecutive
//    operands are 8 neighbouring elements of a row of K or Q (QkDim).
//  - the rows of V^T: they are the head dims that put 8 neighbours of an output row into two
//    neighbouring runs of 4 registers of one lane (OutDim).
#pragma once

#include "geometry.h"

namespace liteattention::gfx942 {

inline constexpr int kChunkBytes = 16;  // the unit of the swizzle

template <int kRows>
struct Layout {
    static constexpr int kTile = kRows;                           // rows and columns of a tile
    static constexpr int kGroups = kWaveSize / kTile;             // of lanes with equal columns
    static constexpr int kDepth = 4 * kGroups;                    // contraction of one MFMA
    static constexpr int kRegisters = kTile * kTile / kWaveSize;  // of an accumulator
    static constexpr int kRuns = kRegisters / 4;                  // of 4 neighbouring rows

    static constexpr int Group(int lane) { return lane / kTile; }
    static constexpr int Col(int lane) { return lane % kTile; }

    // Element e (0..7) of fragment `step` (0..D/(2 kDepth)-1) of a row of K or Q, as held by
    // `lane`. Elements 0..3 are the operand of one MFMA, 4..7 that of the next.
    static constexpr int QkDim(int step, int lane, int e) {
        return 2 * kDepth * step + 8 * Group(lane) + e;
    }

    // Key of register i of score tile `tile`; its query is Col(lane).
    static constexpr int ScoreKey(int tile, int lane, int i) {
        return kTile * tile + kDepth * (i / 4) + 4 * Group(lane) + i % 4;
    }

    // First head dim of run `run` of a lane's outputs: registers 4 (run % kRuns) .. + 3 of tile
    // run / kRuns. Runs 2 u and 2 u + 1 are neighbours.
    static constexpr int RunDim(int run, int lane) {
        return 8 * kGroups * (run / 2) + 8 * Group(lane) + 4 * (run % 2);
    }
    // Head dim of row `row` of output tile `tile`.
    static constexpr int OutDim(int tile, int row) {
        return RunDim(tile * kRuns + row / kDepth, row / 4 % kGroups * kTile) + row % 4;
    }
};
using Layout32 = Layout<32>;
using Layout16 = Layout<16>;

// ---- K in LDS ------------------------------------------------------------------------------
//
// A K block is 64 dense rows. Row r stores its 16-byte chunk c at slot c ^ (r % 8). A read of one
// fragment takes the rows of a key tile, one chunk per group; a row is a multiple of 128 bytes (all
// 32 banks), so unswizzled every lane of a group would hit the same 4 banks. Swizzled, 8
// neighbouring lanes cover the 8 slots of 128 bytes: the full 128 bytes a clock, no conflict, no
// padding.

constexpr int KSlot(int row, int chunk) { return chunk ^ (row % 8); }

// Byte of chunk `chunk` of key `row` in a K block of head dim `dim`.
constexpr int KLdsByte(int dim, int row, int chunk) {
    return row * LdsDims(dim) * 2 + KSlot(row, chunk) * kChunkBytes;
}

// Byte that `lane` reads for fragment `step` of key tile `tile`. Only bits 4..6 depend on both the
// lane and the step: with x = 16 G step, KReadByte(.., step) = (KReadByte(.., 0) ^ x % 128) + x -
// x % 128.
template <class L>
constexpr int KReadByte(int dim, int tile, int step, int lane) {
    return KLdsByte(dim, L::kTile * tile + L::Col(lane), L::kGroups * step + L::Group(lane));
}

// A copy to LDS moves 64 dwords to consecutive LDS bytes: one row of D = 128, two of D = 64. The
// swizzle is therefore applied to the source: the row and byte that `lane` fetches.
inline constexpr int kCopyToLdsBytes = kWaveSize * 4;
constexpr int KCopyRows(int dim) { return kCopyToLdsBytes / (dim * 2); }
constexpr int KCopyRow(int dim, int lane) { return lane / (dim / 2); }
constexpr int KCopyByte(int dim, int row, int lane) {
    const int dword = lane % (dim / 2);
    return KSlot(row, dword / 4) * kChunkBytes + dword % 4 * 4;  // the swizzle is its own inverse
}

// ---- V_t in memory -------------------------------------------------------------------------
//
// A K block of V_t is D/T x 64/(2 kDepth) fragments of 64 lanes x 16 bytes: output tile t, keys
// 2 kDepth `pair` and on. A fragment is 1 KiB in one piece and feeds two MFMAs per q tile.

template <class L>
inline constexpr int kVtPairs = kKBlock / (2 * L::kDepth);
template <class L>
constexpr int VtFragment(int tile, int pair) {
    return tile * kVtPairs<L> + pair;
}
template <class L>
constexpr int VtElement(int tile, int pair, int lane, int e) {
    return (VtFragment<L>(tile, pair) * kWaveSize + lane) * 8 + e;
}
// Key of element e (0..7) of `lane` in pair `pair`, and head dim in tile `tile`.
template <class L>
constexpr int VtKey(int pair, int lane, int e) {
    return 2 * L::kDepth * pair + L::kDepth * (e / 4) + 4 * L::Group(lane) + e % 4;
}
template <class L>
constexpr int VtDim(int tile, int lane) {
    return L::OutDim(tile, L::Col(lane));
}

// ---- V in LDS --------------------------------------------------------------------------------
//
// attention_prefill reads V as it lies in a cache, a row per key, and turns it on the way through
// registers. In LDS a K block of V has the fragments of V_t: output tile t, keys 2 kDepth `pair`
// and on, 64 slots of 16 bytes. A lane writes 8 bytes at a time: one head dim of a run of 4
// neighbouring keys. A store takes 16 lanes a clock, which must meet all 32 banks: the slot's
// lowest two bits, always equal among the lanes of one store, are crossed with the group and with
// a bit of the column that differs among them, and the lanes of a store are dealt such that 4 runs
// and 4 pieces of a row meet in each clock (VCopyRun, VCopyPiece). Readers only see their own slot
// moved.

template <class L>
constexpr int VSlot(int lane) {
    if (L::kTile == 32) return lane ^ (lane >> 4 & 1) ^ (lane >> 5 & 1) << 1;
    return lane ^ (lane >> 3 & 1) ^ (lane >> 4 & 1) << 1;
}
template <class L>
constexpr int VReadByte(int lane) {
    return VSlot<L>(lane) * kChunkBytes;
}

// Byte of head dim `dim` and keys 4 run .. + 3 in a block of `keys` keys. For the 4 dims from a
// multiple of 4 on, only bits 4 and 5 differ: VLdsByte(.., dim + e, ..) = VLdsByte(.., dim, ..) ^
// 16 e.
template <class L>
constexpr int VLdsByte(int keys, int dim, int run) {
    const int pairs = keys / (2 * L::kDepth), pair = run / (2 * L::kGroups);
    const int half = run / L::kGroups % 2, group = run % L::kGroups;
    int tile, col;
    if (L::kTile == 32) {
        tile = dim / 32;
        col = dim / 16 % 2 * 16 + dim / 4 % 2 * 8 + dim / 8 % 2 * 4 + dim % 4;
    } else {
        tile = dim / 32 * 2 + dim / 4 % 2;
        col = dim / 8 % 4 * 4 + dim % 4;
    }
    return ((tile * pairs + pair) * kWaveSize + VSlot<L>(L::kTile * group + col)) * kChunkBytes +
           half * kChunkBytes / 2;
}

// Four waves copy a block of keys, a lane one piece of each row of one run: 16 bytes, 8 at D = 64,
// where the block has 256 pieces of 16 bytes per two rows only. K's pieces go to neighbouring
// lanes, V's as said above. `thread` is 0..255. Pieces past the head's own dims are zero.
constexpr int kCopyThreads = 4 * kWaveSize;
constexpr int PieceBytes(int dim) { return dim > 64 ? 16 : 8; }
constexpr int Pieces(int dim) { return LdsDims(dim) * 2 / PieceBytes(dim); }
constexpr int KCopyPiece(int dim, int thread) { return thread % Pieces(dim); }
constexpr int KCopyRun(int dim, int thread) { return thread / Pieces(dim); }

constexpr int Bit(int x, int from, int to) { return (x >> from & 1) << to; }
constexpr int VCopyPiece(int dim, int thread) {
    const int low = dim > 64 ? Bit(thread, 0, 0) | Bit(thread, 1, 1) | Bit(thread, 4, 2)
                             : Bit(thread, 0, 1) | Bit(thread, 1, 2) | Bit(thread, 4, 0);
    return low | Bit(thread, 5, 3) | (dim > 128 ? Bit(thread, 6, 4) : 0);
}
template <class L>
constexpr int VCopyRun(int dim, int thread) {
    if (L::kTile == 32)
        return Bit(thread, 2, 1) | Bit(thread, 3, 0) | Bit(thread, 6, 2) | Bit(thread, 7, 3);
    const int low = Bit(thread, 2, 2) | Bit(thread, 3, 0);
    return low | (dim > 128 ? Bit(thread, 7, 1) : Bit(thread, 6, 1) | Bit(thread, 7, 3));
}

}  // namespace liteattention::gfx942
