// The attention of one q block, written once for every instruction-set path.
//
// Included by kernel_*.cpp inside a namespace of their own, after Vec (vec_*.h) and a Gemm
// (gemm_*.h): the same names must not meet across files compiled for different processors.
//
// Road map. A q block is cut into q tiles of Gemm::kQTile rows. A q tile walks its K blocks in
// groups of kGroup (256 keys):
//
//   scores   S^T = K Q^T            keys x rows, fp32      one product per K block
//   vote     row maxima per K block against the running maximum; bits of the next skip bitmap
//   softmax  P^T = exp2(c (S^T - M))  keys x rows          M = running maximum, exactly 1 there
//   output   O^T = O^T * 2^(M_old - M) + V^T P^T           head dim x rows, fp32
//
// Everything is transposed so that a query row is a vector lane: maxima, sums and rescaling run
// down the lanes and no step reduces across one. K is the left operand as it lies in memory (rows
// of head dim), Q is packed once per q tile and V^T once per call.
//
// Memory of one q tile of R = 128 rows at head dim 128 (all in a 2 MiB L2): S 128 KiB, P 64 KiB,
// O 64 KiB, Q 32 KiB. On AMX, half the rows would read K and V twice as often: at 8,192 keys they
// come from the L3 cache, and 64 rows were a third slower. Vector products take long enough to hide
// that: there R is 64, so that rows of S, P, O and Q follow each other without gaps in a pass of 4
// vectors of lanes, 3 to 6 % faster.

namespace {

constexpr float kLowest = -__builtin_inff();
constexpr int kStagingWords = kMaxHeadDim;

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// 2^x for x <= 0 (log2 units), relative error 8e-8, exactly 1 at 0 and exactly 0 below 2^-150.
// Coefficients: minimax of 2^f on [-1/2, 1/2], degree 6, constant term held at 1.
inline Vec Exp2(Vec x) {
    // The constant first: Max keeps a NaN in its second argument.
    x = Vec::Max(Vec::Set(-200.0f), x);
    Vec whole, f;
    Vec::Split(x, &whole, &f);
    Vec p = Vec::Set(0.00015345812f);
    p = Vec::MulAdd(p, f, Vec::Set(0.0013399931f));
    p = Vec::MulAdd(p, f, Vec::Set(0.009618489f));
    p = Vec::MulAdd(p, f, Vec::Set(0.055503286f));
    p = Vec::MulAdd(p, f, Vec::Set(0.24022646f));
    p = Vec::MulAdd(p, f, Vec::Set(0.6931472f));
    p = Vec::MulAdd(p, f, Vec::Set(1.0f));
    return Vec::Scale(p, whole);
}

// fp32 to bf16, n values. NaN stays NaN (quiet, sign kept) in every mode. Written without branches
// so that the compiler makes vectors of it.
template <Rounding kMode>
inline void ToBf16(const float* from, int n, uint16_t* to) {
    for (int i = 0; i < n; ++i) {
        uint32_t x;
        std::memcpy(&x, from + i, sizeof x);
        const uint32_t nan = 0u - static_cast<uint32_t>((x & 0x7fffffffu) > 0x7f800000u);
        const uint32_t odd = x >> 16 & 1;
        const uint32_t add = kMode == Rounding::kRtne   ? 0x7fffu + odd
                             : kMode == Rounding::kRtna ? 0x8000u
                                                        : 0u;
        const uint32_t rounded = (x + add) >> 16, quiet = x >> 16 | 0x40u;
        to[i] = static_cast<uint16_t>((rounded & ~nan) | (quiet & nan));
    }
}

template <DType kType>
inline void LoadFloats(const char* from, int64_t n, float* to) {
    if constexpr (kType == DType::kFp32) {
        std::memcpy(to, from, static_cast<size_t>(n) * 4);
    } else {
        const uint16_t* half = reinterpret_cast<const uint16_t*>(from);
        for (int64_t i = 0; i < n; i += 8) {  // head dims are multiples of 8
            alignas(64) uint16_t in[16] = {};
            alignas(64) float out[16];
            std::memcpy(in, half + i, 16);
            for (int x = 0; x < 16; x += Vec::kLanes)
                (kType == DType::kBf16 ? Vec::FromBf16(in + x) : Vec::FromFp16(in + x))
                    .Store(out + x);
            std::memcpy(to + i, out, 32);
        }
    }
}

// Soft cap: cap * tanh(scale * x / cap), relative error below 5e-7 however large the cap is.
class SoftCap {
   public:
    explicit SoftCap(const AttentionParams& p)
        : scale_(Vec::Set(static_cast<float>(p.scale < 0 ? -p.scale : p.scale))),
          inner_(scale_ * Vec::Set(static_cast<float>(1 / p.soft_cap))),
          cap_(Vec::Set(static_cast<float>(p.soft_cap))) {}

    Vec operator()(Vec x) const {
        const Vec one = Vec::Set(1.0f), zero = Vec::Set(0.0f);
        const Vec t = x * inner_, square = t * t;
        // Up to 1/2: tanh(t) / t, minimax in t^2, relative error 1.5e-8. 1 - e below would cancel.
        Vec ratio = Vec::Set(0.017241491f);
        ratio = Vec::MulAdd(ratio, square, Vec::Set(-0.053045494f));
        ratio = Vec::MulAdd(ratio, square, Vec::Set(0.13325879f));
        ratio = Vec::MulAdd(ratio, square, Vec::Set(-0.33333144f));
        ratio = Vec::MulAdd(ratio, square, one);
        const uint32_t negative = Vec::LessEqual(t, zero);
        const Vec magnitude = Vec::Select(negative, zero - t, t);
        const Vec e = Exp2(magnitude * Vec::Set(-2.8853900817779268f));  // e^(-2 |t|)
        const Vec tanh = (one - e) / (one + e);
        return Vec::Select(Vec::LessEqual(square, Vec::Set(0.25f)), x * scale_ * ratio,
                           cap_ * Vec::Select(negative, zero - tanh, tanh));
    }

   private:
    Vec scale_, inner_, cap_;
};

// An fp8 number as a float; exact, and exact in bf16 and fp16 too (e5m2 is the upper half of fp16).
inline float FromFp8(uint8_t x, KvType type) {
    const bool e4m3 = type == KvType::kFp8E4m3;
    const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    const int exponent = (x & 0x7f) >> mantissa_bits, mantissa = x & ((1 << mantissa_bits) - 1);
    float value;
    if (e4m3 ? (x & 0x7f) == 0x7f : (exponent == 31 && mantissa))
        value = __builtin_nanf("");
    else if (!e4m3 && exponent == 31)
        value = __builtin_inff();
    else if (exponent == 0)
        value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
    else
        value = std::ldexp(static_cast<float>(mantissa | 1 << mantissa_bits),
                           exponent - bias - mantissa_bits);
    return x & 0x80 ? -value : value;
}

// All 256 numbers of an fp8 type as floats.
inline const float* Fp8Table(KvType type) {
    struct Tables {
        float of[2][256];
        Tables() {
            for (int x = 0; x < 256; ++x) {
                of[0][x] = FromFp8(static_cast<uint8_t>(x), KvType::kFp8E4m3);
                of[1][x] = FromFp8(static_cast<uint8_t>(x), KvType::kFp8E5m2);
            }
        }
    };
    static const Tables tables;
    return tables.of[type == KvType::kFp8E5m2];
}

template <class Gemm, DType kType>
struct KernelImpl {
    static constexpr bool kPairs = Gemm::kPerWord == 2;  // operands are pairs of bf16
    static constexpr int64_t kElement = sizeof(typename Gemm::Element);
    static constexpr int64_t kInput = kType == DType::kFp32 ? 4 : 2;
    static constexpr int kBlockWords = kKBlock / Gemm::kPerWord;  // words of 64 keys

    static int64_t KeyDim(const AttentionParams& p) { return RoundUp(p.head_dim, Gemm::kKPad); }
    static int64_t KeyWords(const AttentionParams& p) { return KeyDim(p) / Gemm::kPerWord; }
    static int64_t ValueRows(const AttentionParams& p) { return RoundUp(p.head_dim, Gemm::kMPad); }

    static size_t KBlockBytes(const AttentionParams& p) {
        return static_cast<size_t>(kKBlock * KeyDim(p) * kElement);
    }
    static size_t VBlockBytes(const AttentionParams& p) {
        return static_cast<size_t>(RoundUp(p.head_dim, 16) * kKBlock * kElement);
    }
    // K blocks are read in place where they lie in one page.
    static bool KDirect(const AttentionParams& p) {
        return kElement == kInput && KeyDim(p) == p.head_dim && p.kv_type == KvType::kSame &&
               (!p.pages || p.page_size % kKBlock == 0);
    }

    static int64_t BlocksOf(const AttentionParams& p) { return (p.kv_len + kKBlock - 1) / kKBlock; }

    static const char* Row(const void* base, const Strides& s, int64_t batch, int64_t row,
                           int64_t head) {
        return static_cast<const char*>(base) +
               (batch * s.batch + row * s.seq + head * s.head) * kInput;
    }

    static int64_t KvBytes(const AttentionParams& p) {
        return p.kv_type == KvType::kSame ? kInput : 1;
    }

    // Key or value row of a kv head, wherever its page is.
    static const char* KvRow(const AttentionParams& p, const void* base, const Strides& s,
                             int64_t batch, int64_t key, int64_t head) {
        if (p.pages) {
            const int64_t page = key / p.page_size;
            batch = p.pages[page];
            key -= page * p.page_size;
        }
        return static_cast<const char*>(base) +
               (batch * s.batch + key * s.seq + head * s.head) * KvBytes(p);
    }

    static void PackK(const AttentionParams& p, int64_t batch, int64_t kv_head, int64_t block,
                      char* dst) {
        const int64_t row_bytes = KeyDim(p) * kElement;
        const int64_t keys = Min(kKBlock, p.kv_len - block * kKBlock);
        std::memset(dst, 0, KBlockBytes(p));
        for (int64_t i = 0; i < keys; ++i)
            CopyKvRow(p, KvRow(p, p.k, p.k_strides, batch, block * kKBlock + i, kv_head),
                      dst + i * row_bytes);
    }

    // Keys before it lie before every row's window.
    static int64_t FirstKey(const AttentionParams& p) {
        return p.window ? p.kv_len - p.q_len - p.window + 1 : 0;
    }

    // V^T block: row = head dim, 64 keys in a row. Keys that no row sees, past the end or before
    // the window, are 0, so that 0 * V is 0 whatever their pages hold.
    static void PackV(const AttentionParams& p, int64_t batch, int64_t kv_head, int64_t block,
                      char* dst) {
        alignas(64) uint32_t staging[16 * kStagingWords];
        const int64_t dims = RoundUp(p.head_dim, 16);
        const int64_t first = FirstKey(p);
        uint32_t* to = reinterpret_cast<uint32_t*>(dst);
        for (int64_t word = 0; word < kBlockWords; word += 16) {
            for (int64_t i = 0; i < 16; ++i) {
                uint32_t* row = staging + i * dims;
                const int64_t key = block * kKBlock + (word + i) * Gemm::kPerWord;
                std::memset(row, 0, static_cast<size_t>(dims) * 4);
                auto seen = [&](int64_t k) {
                    return k >= first && k < p.kv_len
                               ? KvRow(p, p.v, p.v_strides, batch, k, kv_head)
                               : nullptr;
                };
                if constexpr (kPairs) {
                    alignas(64) uint16_t wide[kMaxHeadDim];
                    for (int half = 0; half < 2; ++half) {
                        const char* found = seen(key + half);
                        if (!found) continue;
                        if (p.kv_type != KvType::kSame) {
                            CopyKvRow(p, found, reinterpret_cast<char*>(wide));
                            found = reinterpret_cast<const char*>(wide);
                        }
                        const uint16_t* value = reinterpret_cast<const uint16_t*>(found);
                        for (int64_t d = 0; d < p.head_dim; ++d)
                            row[d] |= static_cast<uint32_t>(value[d]) << 16 * half;
                    }
                } else if (const char* found = seen(key)) {
                    CopyKvRow(p, found, reinterpret_cast<char*>(row));
                }
            }
            for (int64_t d = 0; d < dims; d += 16)
                Transpose16x16(staging + d, dims, to + d * kBlockWords + word, kBlockWords);
        }
    }

    // Scratch of one thread, carved from one buffer.
    struct Scratch {
        float* scores;    // [kGroup * 64][R]; fp32 kernels turn it into probabilities in place
        uint32_t* probs;  // [kGroup * 32][R] pairs of keys, or `scores`
        uint32_t* query;  // [key words][R]
        float* output;    // [value rows][R]
        float* running;   // [R] running maximum, raw scores
        float* shift;     // [R] M: the running maximum that `sum` refers to, 0 before any key
        float* alpha;     // [R] 2^(M_old - M)
        float* sum;       // [R] sum of probabilities
        int32_t* kept;    // [k_blocks] K blocks in walking order
        uint32_t* votes;  // [words] keep bits of this q block

        // Places the parts at `base` (may be null: nothing is placed) and returns their size.
        int64_t Carve(const AttentionParams& p, char* base) {
            const int64_t rows = kMaxQTile;
            const int64_t k_blocks = BlocksOf(p);
            int64_t used = 0;
            auto take = [&](auto** to, int64_t count) {
                using T = std::remove_reference_t<decltype(**to)>;
                if (base) *to = reinterpret_cast<T*>(base + used);
                used += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
            };
            take(&scores, kGroup * kKBlock * rows);
            take(&probs, kPairs ? kGroup * kBlockWords * rows : 0);
            if (!kPairs) probs = reinterpret_cast<uint32_t*>(scores);
            take(&query, RoundUp(KeyWords(p), 16) * rows);
            take(&output, RoundUp(p.head_dim, 16) * rows);
            take(&running, rows);
            take(&shift, rows);
            take(&alpha, rows);
            take(&sum, rows);
            take(&kept, k_blocks);
            take(&votes, RoundUp(k_blocks, 32) / 32);
            return used;
        }
    };

    static size_t ScratchBytes(const AttentionParams& p) {
        Scratch s{};
        return static_cast<size_t>(s.Carve(p, nullptr));
    }

    // What a walk needs to know beside the request.
    struct Walk {
        const QBlockTask& task;
        const AttentionParams& p;
        const Scratch& s;
        int64_t rows;      // valid rows of this q tile
        int64_t stride;    // rows rounded up to 16: the R of the layouts above
        int64_t first;     // its first row in the sequence
        int64_t per_head;  // rows of one head: lane r is row first + r % per_head of head
                           // task.head + r / per_head
        float c;           // |scale| * log2(e); with a soft cap scores are scaled: log2(e)
        bool vote;
        bool soft;
    };

    static void Run(const QBlockTask& task, char* memory) {
        const AttentionParams& p = *task.params;
        Scratch s{};
        s.Carve(p, memory);
        const int64_t words = RoundUp(BlocksOf(p), 32) / 32;
        const int64_t count = ListKept(task, words, s.kept);
        const LiteParams* lite = task.lite;
        const bool vote = lite && lite->threshold > kLowest;
        const bool soft = vote && lite->soft_skip;
        if (lite) std::memset(s.votes, 0, static_cast<size_t>(words) * 4);

        // A scale of 0 makes every score 0; c = 1 then keeps the arithmetic finite.
        const float c = Factor(p);
        const int64_t tile = soft ? SoftTile(lite->vote_rows) : Gemm::kQTile;
        for (int64_t row = task.row_begin; row < task.row_end; row += tile) {
            const int64_t per_head = Min(tile, task.row_end - row);
            const int64_t rows = per_head * task.heads;
            const Walk walk{task, p,        s, rows, RoundUp(rows, kRowStep),
                            row,  per_head, c, vote, soft};
            // The list is the whole task's: this tile sees none of the last ones.
            const int64_t seen = row + per_head + p.kv_len - p.q_len;
            int64_t blocks = count;
            while (p.causal && blocks && s.kept[blocks - 1] * int64_t{kKBlock} >= seen) --blocks;
            QTile(walk, blocks);
        }
        if (!lite) return;
        for (int64_t w = 0; w < words; ++w) {
            const uint32_t must = lite->must_do ? lite->must_do[w] : 0;
            const uint32_t seen = KeptWord(*lite, task.read, w, BlocksOf(p));
            task.write[w] = vote ? (s.votes[w] | must) & seen : seen;
        }
    }

    // What turns a stored score into log2 units.
    static float Factor(const AttentionParams& p) {
        const double scale = p.soft_cap > 0 ? 1.0 : p.scale < 0 ? -p.scale : p.scale;
        return scale == 0 ? 1.0f : static_cast<float>(scale * 1.4426950408889634);
    }

    // Address of a lane's row of q or out.
    static char* LaneRow(const Walk& walk, const void* base, const Strides& s, int64_t r) {
        const int64_t head = r / walk.per_head, row = r - head * walk.per_head;
        return const_cast<char*>(
            Row(base, s, walk.task.batch, walk.first + row, walk.task.head + head));
    }

    // Rows of a q tile under soft_skip: whole vote groups, near Gemm::kQTile.
    static int64_t SoftTile(int64_t vote_rows) {
        return Gemm::kQTile % vote_rows == 0 ? Gemm::kQTile : kMaxQTile / vote_rows * vote_rows;
    }

    // Lists the K blocks to walk, in walking order. Dense: those the causal mask leaves.
    static int64_t ListKept(const QBlockTask& task, int64_t words, int32_t* kept) {
        const AttentionParams& p = *task.params;
        int64_t count = 0;
        if (!task.lite) {
            const int64_t offset = p.kv_len - p.q_len;
            const int64_t keys = p.causal ? Min(p.kv_len, task.row_end + offset) : p.kv_len;
            const int64_t first = p.window ? task.row_begin + offset - p.window + 1 : 0;
            for (int64_t j = first > 0 ? first / kKBlock : 0; j * kKBlock < keys; ++j)
                kept[count++] = static_cast<int32_t>(j);
            return count;
        }
        for (int64_t w = 0; w < words; ++w)
            for (uint32_t bits = KeptWord(*task.lite, task.read, w, BlocksOf(p)); bits;
                 bits &= bits - 1)
                kept[count++] = static_cast<int32_t>(w * 32 + __builtin_ctz(bits));
        if (task.lite->descending) {
            for (int64_t i = 0, j = count - 1; i < j; ++i, --j) {
                const int32_t t = kept[i];
                kept[i] = kept[j];
                kept[j] = t;
            }
        }
        return count;
    }

    // A key or value row in the kernel's own element type.
    static void CopyKvRow(const AttentionParams& p, const char* from, char* to) {
        if (p.kv_type == KvType::kSame) return CopyRow(from, p.head_dim, to);
        const float* table = Fp8Table(p.kv_type);
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
        for (int64_t d = 0; d < p.head_dim; ++d) {
            if constexpr (kPairs) {
                uint32_t bits;
                std::memcpy(&bits, table + bytes[d], sizeof bits);
                reinterpret_cast<uint16_t*>(to)[d] = static_cast<uint16_t>(bits >> 16);
            } else {
                reinterpret_cast<float*>(to)[d] = table[bytes[d]];
            }
        }
    }

    static void CopyRow(const char* from, int64_t n, char* to) {
        if constexpr (kPairs)
            std::memcpy(to, from, static_cast<size_t>(n) * 2);
        else
            LoadFloats<kType>(from, n, reinterpret_cast<float*>(to));
    }

    // Q^T of the tile, [key words][R]. The sign of the scale goes here, so that scores only ever
    // meet a positive factor; rows past the end are 0.
    static void PackQ(const Walk& walk) {
        const AttentionParams& p = walk.p;
        alignas(64) uint32_t staging[16 * kStagingWords];
        const int64_t words = RoundUp(KeyWords(p), 16);
        const int64_t kv_words = p.head_dim / Gemm::kPerWord;
        const uint32_t flip = p.scale < 0 ? (kPairs ? 0x80008000u : 0x80000000u) : 0u;
        for (int64_t slot = 0; slot < walk.stride; slot += 16) {
            std::memset(staging, 0, static_cast<size_t>(16 * words) * 4);
            for (int64_t i = 0; i < Min(16, walk.rows - slot) && p.scale != 0; ++i) {
                uint32_t* row = staging + i * words;
                CopyRow(LaneRow(walk, p.q, p.q_strides, slot + i), p.head_dim,
                        reinterpret_cast<char*>(row));
                for (int64_t w = 0; w < kv_words; ++w) row[w] ^= flip;
            }
            for (int64_t w = 0; w < words; w += 16)
                Transpose16x16(staging + w, words, walk.s.query + w * walk.stride + slot,
                               walk.stride);
        }
    }

    static void QTile(const Walk& walk, int64_t count) {
        const AttentionParams& p = walk.p;
        const Scratch& s = walk.s;
        PackQ(walk);
        for (int64_t r = 0; r < walk.stride; ++r) {
            s.running[r] = kLowest;
            s.shift[r] = 0.0f;
            s.sum[r] = 0.0f;
        }
        if (count == 0)
            std::memset(s.output, 0, static_cast<size_t>(ValueRows(p) * walk.stride) * 4);

        for (int64_t begin = 0; begin < count; begin += kGroup) {
            const int blocks = static_cast<int>(Min(kGroup, count - begin));
            const int32_t* kept = s.kept + begin;
            uint32_t dropped[kGroup];  // bit = 16-row slot whose part of the block is dropped
            for (int t = 0; t < blocks; ++t) {
                float* scores = s.scores + t * kKBlock * walk.stride;
                Scores(walk, kept[t], scores);
                if (p.soft_cap > 0) Cap(walk, scores);
                MaskBlock(walk, kept[t], scores);
                dropped[t] = Maxima(walk, kept[t], scores);
            }
            Shift(walk);
            Probabilities(walk, blocks, dropped, kept, count - begin);
            if (begin != 0) Rescale(walk);
            Output(walk, blocks, kept, begin != 0);
        }
        Store(walk);
    }

    struct Rows {
        const char* data;
        int64_t stride;  // bytes
    };

    // K block `block`: where the caller has it, or packed.
    static Rows Keys(const Walk& walk, int64_t block) {
        const AttentionParams& p = walk.p;
        const int64_t full = KDirect(p) ? p.kv_len / kKBlock : 0;
        if (block < full) {
            const int64_t kv_head = walk.task.head / (p.q_heads / p.kv_heads);
            return {KvRow(p, p.k, p.k_strides, walk.task.batch, block * kKBlock, kv_head),
                    p.k_strides.seq * kInput};
        }
        const int64_t first = full > walk.task.packed_first ? full : walk.task.packed_first;
        return {walk.task.k_packed + (block - first) * static_cast<int64_t>(KBlockBytes(p)),
                KeyDim(p) * kElement};
    }

    static const char* Values(const Walk& walk, int64_t block) {
        return walk.task.v_packed +
               (block - walk.task.packed_first) * static_cast<int64_t>(VBlockBytes(walk.p));
    }

    static constexpr int64_t kEdgeRows = 32;  // of the output that are formed together on the edge

    // Rows at the top of the tile that see no key from `key` on, in multiples of kRowStep. With
    // rows of several heads the causal edge is not a straight one: none then.
    static int64_t HiddenRows(const Walk& walk, int64_t key) {
        const AttentionParams& p = walk.p;
        if (!p.causal || walk.per_head != walk.rows) return 0;
        const int64_t hidden = key - (p.kv_len - p.q_len) - walk.first;
        return hidden <= 0 ? 0 : Min(hidden / kRowStep * kRowStep, walk.stride);
    }

    // S^T of a K block. On the causal edge it is formed in strips of 16 keys for the rows that see
    // any of them; MaskBlock hides the others. With 128 keys and rows that is 0.56 of the work.
    static void Scores(const Walk& walk, int64_t block, float* scores) {
        const Rows keys = Keys(walk, block);
        const int64_t stride = walk.stride, key = block * kKBlock;
        const bool edge = HiddenRows(walk, key + kKBlock - 1) > 0;
        const int strip = edge ? 16 : kKBlock;
        for (int i = 0; i < kKBlock; i += strip) {
            const int64_t r = edge ? HiddenRows(walk, key + i) : 0;
            const char* from = keys.data + i * keys.stride;
            Gemm::Multiply(strip, static_cast<int>(stride - r), 1, &from, keys.stride,
                           static_cast<int>(KeyWords(walk.p)), walk.s.query + r, stride,
                           scores + i * stride + r, stride, false);
        }
    }

    // O^T of a group: (+)= V^T P^T. On the causal edge kEdgeRows at a time, with the keys they see.
    static void Output(const Walk& walk, int blocks, const int32_t* kept, bool accumulate) {
        const AttentionParams& p = walk.p;
        const Scratch& s = walk.s;
        const int64_t stride = walk.stride;
        const char* values[kGroup];
        for (int t = 0; t < blocks; ++t) values[t] = Values(walk, kept[t]);
        const auto multiply = [&](int first, int count, int words, int64_t r, int64_t rows,
                                  bool add) {
            Gemm::Multiply(static_cast<int>(ValueRows(p)), static_cast<int>(rows), count,
                           values + first, kKBlock * kElement, words,
                           s.probs + first * kBlockWords * stride + r, stride, s.output + r, stride,
                           add);
        };
        if (!HiddenRows(walk, kept[blocks - 1] * int64_t{kKBlock} + kKBlock - 1))
            return multiply(0, blocks, kBlockWords, 0, stride, accumulate);
        for (int64_t r = 0; r < stride; r += kEdgeRows) {
            const int64_t rows = Min(kEdgeRows, stride - r);
            const int64_t seen =
                walk.first + r + rows + p.kv_len - p.q_len;  // keys, by its last row
            int whole = 0;
            while (whole < blocks && (kept[whole] + 1) * int64_t{kKBlock} <= seen) ++whole;
            if (whole || !accumulate) multiply(0, whole, kBlockWords, r, rows, accumulate);
            if (whole == blocks) continue;
            const int64_t rest = seen - kept[whole] * int64_t{kKBlock};
            const int64_t words = RoundUp(rest, 16 * Gemm::kPerWord) / Gemm::kPerWord;
            if (rest > 0) multiply(whole, 1, static_cast<int>(words), r, rows, true);
        }
    }

    // Asks for `bytes` at `from` to be brought into the L2 cache.
    static void Fetch(const char* from, int64_t bytes) {
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
    }

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
        const bool above = p.causal && key + kKBlock - 1 > walk.first + offset;
        const bool below = p.window && key <= walk.first + offset + walk.per_head - 1 - p.window;
        if (!above && !below) return;
        if (below || walk.per_head != walk.rows) return MaskLanes(walk, key, scores);
        for (int64_t i = 0; i < kKBlock; ++i) {
            const int64_t hidden = Min(walk.stride, key + i - offset - walk.first);
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
            const int64_t to = p.causal ? at : kKBlock;
            low[r] = static_cast<int32_t>(from < 0 ? 0 : Min(from, kKBlock));
            high[r] = static_cast<int32_t>(to < -1 ? -1 : Min(to, kKBlock));
        }
        for (int32_t i = 0; i < kKBlock; ++i) {
            float* row = scores + i * walk.stride;
            for (int64_t r = 0; r < walk.stride; ++r)
                row[r] = i < low[r] || i > high[r] ? kLowest : row[r];
        }
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
            Vec shift[kVecs], sum[kVecs];
            for (int x = 0; x < kVecs; ++x) {
                shift[x] = Vec::Load(s.shift + r + x * Vec::kLanes);
                sum[x] = Vec::Set(0.0f);
            }
            for (int t = 0; t < blocks; ++t) {
                // Output reads nothing of blocks that none of its rows sees.
                const int64_t end = RoundUp(r + kVecs * Vec::kLanes, kEdgeRows);
                if (HiddenRows(walk, kept[t] * int64_t{kKBlock}) >= end) continue;
                float* scores = s.scores + t * kKBlock * stride + r;
                if (dropped[t]) MaskSlots(walk, dropped[t], r, kVecs, scores);
                const bool fetch = r == 0 && t + kGroup < left;
                const Rows next = Keys(walk, kept[fetch ? t + kGroup : t]);
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
            }
            for (int x = 0; x < kVecs; ++x) {
                const int64_t row = r + x * Vec::kLanes;
                Vec::MulAdd(Vec::Load(s.sum + row), Vec::Load(s.alpha + row), sum[x])
                    .Store(s.sum + row);
            }
        });
    }

    // Hides the dropped 16-row slots of a panel from this step: their scores become -inf.
    static void MaskSlots(const Walk& walk, uint32_t dropped, int64_t r, int vecs, float* scores) {
        for (int64_t x = 0; x < vecs * Vec::kLanes; ++x) {
            if (!(dropped >> ((r + x) / kRowStep) & 1)) continue;
            for (int i = 0; i < kKBlock; ++i) scores[i * walk.stride + x] = kLowest;
        }
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

    // Rounds 16 x 16 outputs to the caller's dtype; fp32 stays where it is.
    static void Round(Rounding mode, const float* tile, uint16_t* half) {
        if constexpr (kType == DType::kFp16) {
            for (int x = 0; x < 256; x += Vec::kLanes) Vec::Load(tile + x).ToFp16(half + x);
        } else if constexpr (kType == DType::kBf16) {
            if (mode == Rounding::kRtne)
                ToBf16<Rounding::kRtne>(tile, 256, half);
            else if (mode == Rounding::kRtna)
                ToBf16<Rounding::kRtna>(tile, 256, half);
            else
                ToBf16<Rounding::kRtz>(tile, 256, half);
        }
    }

    // Writes a row's LSE and returns the factor that its sum of values is to be multiplied with.
    // `shift` is the row's maximum M as the scores are stored, `sum` that of 2^(c (score - M)).
    static float Finish(const AttentionParams& p, int64_t batch, int64_t head, int64_t row,
                        float shift, float sum) {
        const double scale = p.soft_cap > 0 ? 1.0 : p.scale < 0 ? -p.scale : p.scale;
        const double top = static_cast<double>(shift) * scale;
        float* lse = p.lse ? p.lse + (batch * p.q_heads + head) * p.lse_head + row : nullptr;
        if (!p.sinks) {
            if (lse)
                *lse = sum == 0.0f ? kLowest
                                   : static_cast<float>(top + std::log(static_cast<double>(sum)));
            return sum == 0.0f ? 0.0f : static_cast<float>(p.v_scale) / sum;
        }
        // The sink is one more term of the sum; the larger of both maxima keeps it finite.
        const double sink = static_cast<double>(p.sinks[head]);
        const double both = sum == 0.0f || sink > top ? sink : top;
        if (both == static_cast<double>(kLowest)) {
            if (lse) *lse = kLowest;
            return 0.0f;
        }
        const double keys = sum == 0.0f ? 0.0 : std::exp(top - both);
        const double total = static_cast<double>(sum) * keys + std::exp(sink - both);
        if (lse) *lse = static_cast<float>(both + std::log(total));
        return static_cast<float>(p.v_scale * keys / total);
    }

    static void Store(const Walk& walk) {
        const AttentionParams& p = walk.p;
        const Scratch& s = walk.s;
        for (int64_t r = 0; r < walk.rows; ++r) {
            const int64_t head = walk.task.head + r / walk.per_head;
            const int64_t row = walk.first + r % walk.per_head;
            s.alpha[r] = Finish(p, walk.task.batch, head, row, s.shift[r], s.sum[r]);
        }
        for (int64_t r = walk.rows; r < walk.stride; ++r) s.alpha[r] = 0.0f;
        alignas(64) float tile[16 * 16];
        alignas(64) uint16_t half[16 * 16];
        for (int64_t slot = 0; slot < walk.stride; slot += 16) {
            const int64_t valid = Min(16, walk.rows - slot);
            char* out[16];
            for (int64_t i = 0; i < valid; ++i)
                out[i] = LaneRow(walk, p.out, p.out_strides, slot + i);
            for (int64_t d = 0; d < p.head_dim; d += 16) {
                for (int64_t i = 0; i < Min(16, p.head_dim - d); ++i) {
                    float* row = s.output + (d + i) * walk.stride + slot;
                    for (int x = 0; x < 16; x += Vec::kLanes)
                        (Vec::Load(row + x) * Vec::Load(s.alpha + slot + x)).Store(row + x);
                }
                Transpose16x16(reinterpret_cast<const uint32_t*>(s.output + d * walk.stride + slot),
                               walk.stride, reinterpret_cast<uint32_t*>(tile), 16);
                Round(p.rounding, tile, half);
                const char* rounded = kType == DType::kFp32 ? reinterpret_cast<const char*>(tile)
                                                            : reinterpret_cast<const char*>(half);
                for (int64_t i = 0; i < valid; ++i) {
                    char* to = out[i] + d * kInput;
                    const char* from = rounded + i * 16 * kInput;
                    if (p.head_dim - d >= 16)
                        std::memcpy(to, from, 16 * kInput);
                    else
                        std::memcpy(to, from, 8 * kInput);
                }
            }
        }
    }
};

template <class Gemm, DType kType>
constexpr Kernel MakeKernel() {
    using K = KernelImpl<Gemm, kType>;
    return {K::KBlockBytes,  K::VBlockBytes, K::KDirect,  K::PackK,   K::PackV,
            K::ScratchBytes, K::Run,         Gemm::Enter, Gemm::Leave};
}

}  // namespace
