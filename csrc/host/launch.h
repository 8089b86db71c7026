// Launches of the gfx942 kernels on a caller's stream: nothing allocates and nothing waits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../gfx942/params.h"
#include "hip_api.h"
#include "plan.h"
#include "plan_ragged.h"

namespace liteattention::gfx942 {

// Dtype of q, k, v and out, and how fp32 results become it.
enum class Number { kBf16Rtne, kBf16Rtna, kBf16Rtz, kFp16, kAny };

// What a cache holds: the queries' numbers, or e4m3fnuz with a scale.
enum class Cache { kSame, kFp8 };

// The kernels of ../gfx942/variants.def, whatever their number format, head dimension and cache.
enum class Family {
    kTransposeV,
    kDense,
    kMergeParts,
    kCountTiles,
    kPlanLpt,
    kPackLists,
    kLite,
    kWeigh,
    kMergeLists,
    kSelectTiles,
    kPrefill,
    kDecode,
    kMergeDecode,
    kMergePrefill,
    kWriteKv
};

// A code object and what its manifest says of its kernels.
struct CodeObject {
    struct Kernel {
        std::string name;
        int64_t argument_bytes = 0;
    };
    std::string file;   // for messages
    std::string image;  // the ELF file itself
    std::vector<Kernel> kernels;
};

// The tensors of one call; strides in elements {batch, seq, head}. The pointers are of the
// device, or of the host if the HIP run-time is the software MI300X.
struct DenseRequest {
    const uint16_t* q = nullptr;
    const uint16_t* k = nullptr;
    const uint16_t* v = nullptr;
    uint16_t* out = nullptr;
    float* lse = nullptr;  // natural log, [batch][q_heads][q_len] contiguous; null: not wanted
    Strides q_strides{};
    Strides k_strides{};
    Strides v_strides{};
    Strides out_strides{};
    double scale = 1.0;
    Number number = Number::kBf16Rtne;
};

// What one LiteAttention step adds; see LiteParams and, with a budget, WeighParams.
struct LiteStep {
    const uint32_t* read = nullptr;
    uint32_t* write = nullptr;
    const uint32_t* must_do = nullptr;
    const uint32_t* must_skip = nullptr;
    float* mass = nullptr;            // with a budget; null: not wanted
    const int32_t* limits = nullptr;  // with a budget; null: the budget's for all heads
    double threshold = 0.0;
    double budget = 0.0;  // share of softmax mass; above 0: threshold -inf, no soft_skip
    bool descending = false;
    bool soft_skip = false;
};

// Tensors and options of one ragged call; see RaggedParams. q and out are [rows][q_heads][D], k and
// v [pages][page_size][kv_heads][D], or packed [keys][kv_heads][D] with page strides unused. What
// the cache holds is in the plan's shape.
struct RaggedRequest {
    const uint16_t* q = nullptr;
    const void* k = nullptr;
    const void* v = nullptr;
    uint16_t* out = nullptr;
    float* lse = nullptr;  // natural log, [q_heads][rows] contiguous; null: not wanted
    const float* sinks = nullptr;
    const int32_t* q_start = nullptr;
    const int32_t* kv_len = nullptr;      // paged
    const int32_t* kv_start = nullptr;    // packed
    const int32_t* page_table = nullptr;  // paged
    RowStrides q_strides{};
    RowStrides out_strides{};
    PageStrides k_strides{};
    PageStrides v_strides{};
    int64_t pages = 0;        // of the cache; packed: 1
    int64_t page_rows = 0;    // of a page; packed: all keys
    int64_t table_width = 0;  // entries of a row
    int64_t page_table_stride = 0;
    double scale = 1.0;
    double k_scale = 1.0;  // of an fp8 cache
    double v_scale = 1.0;
    const float* k_scale_at = nullptr;  // where they lie, of an fp8 cache; null: the numbers above
    const float* v_scale_at = nullptr;
    double soft_cap = 0.0;  // natural units; 0: none
    Number number = Number::kBf16Rtne;
};

// Tensors of one write_kv call; see WriteKvParams.
struct WriteKvRequest {
    const uint16_t* k = nullptr;
    const uint16_t* v = nullptr;
    void* k_cache = nullptr;
    void* v_cache = nullptr;
    Cache cache = Cache::kSame;
    Number number = Number::kAny;  // of k and v, if the cache is not kSame
    double k_scale = 1.0;          // of an fp8 cache
    double v_scale = 1.0;
    const float* k_scale_at = nullptr;  // as in RaggedRequest
    const float* v_scale_at = nullptr;
    const void* slots = nullptr;
    bool wide = false;  // int64 slots, else int32
    RowStrides k_strides{};
    RowStrides v_strides{};
    PageStrides k_cache_strides{};
    PageStrides v_cache_strides{};
    int64_t rows = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;
    int64_t pages = 0;
    int64_t page_size = 0;
};

// The kernels of one device. Key: HIP run-time and device ordinal. Owner: the engine that made it.
// Lifetime: modules are loaded by the constructor and unloaded by the destructor. Immutable in
// between, so any thread may launch on any stream.
class Device {
   public:
    // Throws hip::CallFailed, or std::invalid_argument if `objects` lack a kernel or a kernel takes
    // other arguments than this build passes.
    Device(std::shared_ptr<const hip::Library> library, int ordinal,
           std::vector<CodeObject> objects);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    int ordinal() const { return ordinal_; }
    int compute_units() const { return compute_units_; }

    // `workspace`: plan.workspace_bytes, 16-byte aligned, not shared with a call that may be
    // running. Throws hip::CallFailed, or std::invalid_argument with every reason.
    void Attention(const DensePlan& plan, const DenseRequest& request, void* workspace,
                   hip::Stream stream) const;
    void Lite(const LitePlan& plan, const DenseRequest& request, const LiteStep& step,
              void* workspace, hip::Stream stream) const;
    // Only the order in which Lite would take the tiles of `step`; the memory is as the plan says.
    void PlanLpt(const LitePlan& plan, const LiteStep& step, int32_t* order, int32_t* counts,
                 ListPart* parts, CutList* cuts, hip::Stream stream) const;
    // Prefill, decode and merge, as far as the plan has them.
    void Ragged(const RaggedPlan& plan, const RaggedRequest& request, void* workspace,
                hip::Stream stream) const;
    void WriteKv(const WriteKvRequest& request, hip::Stream stream) const;

   private:
    struct Kernel {
        const char* name;
        hip::Function function;
        unsigned threads;
    };
    // That of a family which has a variant for each of them, or for any (kAny, 0, kSame).
    const Kernel& Find(Family family, int64_t head_dim = 0, Number number = Number::kAny,
                       Cache cache = Cache::kSame) const;
    void Load();
    void Unload();
    void TransposeV(const DenseShape& shape, int64_t grid, const DenseRequest& request,
                    uint16_t* v_t, hip::Stream stream) const;
    void Order(const LitePlan& plan, const LiteStep& step, int32_t* order, int32_t* counts,
               ListPart* parts, CutList* cuts, hip::Stream stream) const;
    void Launch(const Kernel& kernel, int64_t grid, const void* params, size_t bytes,
                hip::Stream stream) const;
    template <class Params>
    void Launch(const Kernel& kernel, int64_t grid, const Params& params,
                hip::Stream stream) const {
        Launch(kernel, grid, &params, sizeof(params), stream);
    }

    std::shared_ptr<const hip::Library> library_;
    int ordinal_;
    int compute_units_ = 0;
    std::vector<CodeObject> objects_;  // HIP does not promise to copy what it loads
    std::vector<hip::Module> modules_;
    std::vector<Kernel> kernels_;
};

}  // namespace liteattention::gfx942
