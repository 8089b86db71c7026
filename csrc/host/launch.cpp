#include "launch.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numbers>
#include <stdexcept>

namespace liteattention::gfx942 {
namespace {

struct Expected {
    const char* name;
    unsigned threads;
    size_t argument_bytes;
};

// In the order of Device's indices.
constexpr Expected kExpected[] = {
    {"transpose_v_bf16_d64", kTransposeThreads, sizeof(TransposeVParams)},
    {"transpose_v_bf16_d128", kTransposeThreads, sizeof(TransposeVParams)},
    {"attention_dense_bf16_d64_rtne", kDenseThreads, sizeof(DenseParams)},
    {"attention_dense_bf16_d64_rtna", kDenseThreads, sizeof(DenseParams)},
    {"attention_dense_bf16_d64_rtz", kDenseThreads, sizeof(DenseParams)},
    {"attention_dense_fp16_d64", kDenseThreads, sizeof(DenseParams)},
    {"attention_dense_bf16_d128_rtne", kDenseThreads, sizeof(DenseParams)},
    {"attention_dense_bf16_d128_rtna", kDenseThreads, sizeof(DenseParams)},
    {"attention_dense_bf16_d128_rtz", kDenseThreads, sizeof(DenseParams)},
    {"attention_dense_fp16_d128", kDenseThreads, sizeof(DenseParams)},
    {"attention_lite_bf16_d64_rtne", kDenseThreads, sizeof(LiteParams)},
    {"attention_lite_bf16_d64_rtna", kDenseThreads, sizeof(LiteParams)},
    {"attention_lite_bf16_d64_rtz", kDenseThreads, sizeof(LiteParams)},
    {"attention_lite_fp16_d64", kDenseThreads, sizeof(LiteParams)},
    {"attention_lite_bf16_d128_rtne", kDenseThreads, sizeof(LiteParams)},
    {"attention_lite_bf16_d128_rtna", kDenseThreads, sizeof(LiteParams)},
    {"attention_lite_bf16_d128_rtz", kDenseThreads, sizeof(LiteParams)},
    {"attention_lite_fp16_d128", kDenseThreads, sizeof(LiteParams)},
    {"merge_parts_bf16_rtne", kMergeThreads, sizeof(MergeParams)},
    {"merge_parts_bf16_rtna", kMergeThreads, sizeof(MergeParams)},
    {"merge_parts_bf16_rtz", kMergeThreads, sizeof(MergeParams)},
    {"merge_parts_fp16", kMergeThreads, sizeof(MergeParams)},
    {"plan_lpt", kPlanThreads, sizeof(PlanParams)},
    {"attention_prefill_bf16_d64_rtne", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d64_rtna", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d64_rtz", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_fp16_d64", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d128_rtne", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d128_rtna", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d128_rtz", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_fp16_d128", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d256_rtne", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d256_rtna", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_bf16_d256_rtz", kDenseThreads, sizeof(RaggedParams)},
    {"attention_prefill_fp16_d256", kDenseThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d64_rtne", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d64_rtna", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d64_rtz", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_fp16_d64", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d128_rtne", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d128_rtna", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d128_rtz", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_fp16_d128", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d256_rtne", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d256_rtna", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_bf16_d256_rtz", kDecodeThreads, sizeof(RaggedParams)},
    {"attention_decode_fp16_d256", kDecodeThreads, sizeof(RaggedParams)},
    {"merge_decode_bf16_rtne", kMergeDecodeThreads, sizeof(RaggedParams)},
    {"merge_decode_bf16_rtna", kMergeDecodeThreads, sizeof(RaggedParams)},
    {"merge_decode_bf16_rtz", kMergeDecodeThreads, sizeof(RaggedParams)},
    {"merge_decode_fp16", kMergeDecodeThreads, sizeof(RaggedParams)},
    {"write_kv", kWriteKvThreads, sizeof(WriteKvParams)},
};

// Modules belong to a device and a null stream is the current device's: makes `device` current for
// this thread, and puts the thread's own back.
class CurrentDevice {
   public:
    CurrentDevice(const hip::Library& library, int device) : library_(library) {
        library_.Check(library_.api().hipGetDevice(&previous_), "hipGetDevice");
        if (previous_ == device) return;
        library_.Check(library_.api().hipSetDevice(device),
                       "hipSetDevice(" + std::to_string(device) + ")");
        changed_ = true;
    }
    ~CurrentDevice() {
        if (changed_) library_.api().hipSetDevice(previous_);
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

   private:
    const hip::Library& library_;
    int previous_ = 0;
    bool changed_ = false;
};

// Tells the software MI300X which host bytes a launch may touch, exactly; a GPU's tensors are
// device memory and need nothing.
class TouchedMemory {
   public:
    explicit TouchedMemory(const hip::Library& library) : library_(library) {}
    ~TouchedMemory() {
        while (count_ > 0) {
            const auto& [begin, bytes] = spans_[--count_];
            library_.host_spans().Remove(begin, bytes);
        }
    }
    TouchedMemory(const TouchedMemory&) = delete;
    TouchedMemory& operator=(const TouchedMemory&) = delete;

    void Add(const char* what, const void* begin, int64_t bytes) {
        if (!library_.emulated() || begin == nullptr) return;
        const std::pair<void*, size_t> span{const_cast<void*>(begin), static_cast<size_t>(bytes)};
        library_.Check(library_.host_spans().Add(span.first, span.second),
                       std::string("hipHostRegister of ") + what);
        spans_[count_++] = span;
    }
    void Add(const char* what, const uint16_t* begin, const Strides& strides, int64_t batch,
             int64_t seq, int64_t heads, int64_t dim) {
        const int64_t last = (batch - 1) * strides.batch + (seq - 1) * strides.seq +
                             (heads - 1) * strides.head + dim;
        Add(what, begin, last * 2);
    }

    void Add(const char* what, const uint16_t* begin, const RowStrides& strides, int64_t rows,
             int64_t heads, int64_t dim) {
        Add(what, begin, Strides{0, strides.row, strides.head}, 1, rows, heads, dim);
    }
    void Add(const char* what, const uint16_t* begin, const PageStrides& strides, int64_t pages,
             int64_t rows, int64_t heads, int64_t dim) {
        Add(what, begin, Strides{strides.page, strides.row, strides.head}, pages, rows, heads, dim);
    }

   private:
    static constexpr int kMost = 12;
    const hip::Library& library_;
    std::array<std::pair<void*, size_t>, kMost> spans_{};
    int count_ = 0;
};

void CheckRows(std::vector<std::string>& reasons, const char* name, const void* pointer,
               const Strides& strides, int64_t batch, int64_t seq, int64_t heads) {
    if (!pointer) {
        reasons.push_back(std::string(name) + " has no memory");
        return;
    }
    const std::array<std::pair<int64_t, int64_t>, 3> steps = {
        {{strides.batch, batch}, {strides.seq, seq}, {strides.head, heads}}};
    bool aligned = reinterpret_cast<uintptr_t>(pointer) % kRowAlignBytes == 0;
    for (const auto& [stride, size] : steps) {
        aligned = aligned && (size == 1 || stride * 2 % kRowAlignBytes == 0);
        if (size > 1 && stride < 0) reasons.push_back(std::string(name) + " has a negative stride");
    }
    if (!aligned)
        reasons.push_back("every row of " + std::string(name) + " must start on a multiple of " +
                          std::to_string(kRowAlignBytes) +
                          " bytes (an even element offset and even strides): call .contiguous() "
                          "on it");
}

void CheckRows(std::vector<std::string>& reasons, const char* name, const void* pointer,
               const RowStrides& strides, int64_t rows, int64_t heads) {
    CheckRows(reasons, name, pointer, {0, strides.row, strides.head}, 1, rows, heads);
}

// Kernels multiply page and row numbers with these distances as 32-bit numbers.
void CheckPages(std::vector<std::string>& reasons, const char* name, const void* pointer,
                const PageStrides& strides, int64_t pages, int64_t rows, int64_t heads) {
    CheckRows(reasons, name, pointer, {strides.page, strides.row, strides.head}, pages, rows,
              heads);
    if ((pages > 1 && strides.page > kMaxKRowStride) || (rows > 1 && strides.row > kMaxKRowStride))
        reasons.push_back("pages and rows of " + std::string(name) + " must be at most " +
                          std::to_string(kMaxKRowStride) + " elements apart, got " +
                          std::to_string(strides.page) + " and " + std::to_string(strides.row));
}

void CheckTensors(std::vector<std::string>& reasons, const DenseShape& s,
                  const DenseRequest& request, const void* workspace) {
    CheckRows(reasons, "q", request.q, request.q_strides, s.batch, s.q_len, s.q_heads);
    CheckRows(reasons, "k", request.k, request.k_strides, s.batch, s.kv_len, s.kv_heads);
    CheckRows(reasons, "v", request.v, request.v_strides, s.batch, s.kv_len, s.kv_heads);
    CheckRows(reasons, "out", request.out, request.out_strides, s.batch, s.q_len, s.q_heads);
    if (s.kv_len > 1 && request.k_strides.seq > kMaxKRowStride)
        reasons.push_back("the rows of k must be at most " + std::to_string(kMaxKRowStride) +
                          " elements apart, got " + std::to_string(request.k_strides.seq) +
                          ": call .contiguous() on it");
    if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 16 != 0)
        reasons.emplace_back("the workspace must be 16-byte aligned memory");
}

void TouchTensors(TouchedMemory& touched, const DenseShape& s, const DenseRequest& request) {
    touched.Add("q", request.q, request.q_strides, s.batch, s.q_len, s.q_heads, s.head_dim);
    touched.Add("k", request.k, request.k_strides, s.batch, s.kv_len, s.kv_heads, s.head_dim);
    touched.Add("v", request.v, request.v_strides, s.batch, s.kv_len, s.kv_heads, s.head_dim);
    touched.Add("out", request.out, request.out_strides, s.batch, s.q_len, s.q_heads, s.head_dim);
    touched.Add("lse", request.lse, s.batch * s.q_heads * s.q_len * 4);
}

int32_t Int(int64_t value) { return static_cast<int32_t>(value); }

// What DenseParams and LiteParams have in common.
template <class Params>
Params AttentionParams(const DenseShape& s, const DenseRequest& request, const uint16_t* v_t) {
    Params params{};
    params.q = request.q;
    params.k = request.k;
    params.v_t = v_t;
    params.out = request.out;
    params.lse = request.lse;
    params.q_strides = request.q_strides;
    params.k_strides = request.k_strides;
    params.out_strides = request.out_strides;
    params.batch = Int(s.batch);
    params.q_heads = Int(s.q_heads);
    params.kv_heads = Int(s.kv_heads);
    params.q_len = Int(s.q_len);
    params.kv_len = Int(s.kv_len);
    params.scale_log2 = static_cast<float>(request.scale * std::numbers::log2e);
    return params;
}

// Of kDense, kLite, kPrefill, kDecode: four numbers per head dimension.
int Variant(int64_t head_dim, Number number) {
    return 4 * (head_dim == 256 ? 2 : head_dim == 128 ? 1 : 0) + static_cast<int>(number);
}

[[noreturn]] void Refuse(const std::string& what, const std::vector<std::string>& reasons) {
    std::string text = what;
    for (size_t i = 0; i < reasons.size(); ++i) text += (i ? "; " : ": ") + reasons[i];
    throw std::invalid_argument(text);
}

}  // namespace

Device::Device(std::shared_ptr<const hip::Library> library, int ordinal,
               std::vector<CodeObject> objects)
    : library_(std::move(library)), ordinal_(ordinal), objects_(std::move(objects)) {
    static_assert(std::size(kExpected) == kKernels);
    std::vector<std::string> reasons;
    for (const Expected& expected : kExpected) {
        const CodeObject::Kernel* found = nullptr;
        for (const CodeObject& object : objects_)
            for (const CodeObject::Kernel& kernel : object.kernels)
                if (kernel.name == expected.name) found = &kernel;
        if (!found)
            reasons.push_back(std::string("no kernel ") + expected.name);
        else if (found->argument_bytes != static_cast<int64_t>(expected.argument_bytes))
            reasons.push_back(found->name + " takes " + std::to_string(found->argument_bytes) +
                              " bytes, this build passes " +
                              std::to_string(expected.argument_bytes));
    }
    if (!reasons.empty()) Refuse("the code objects are not those of this build", reasons);

    const int devices = library_->DeviceCount();
    if (ordinal < 0 || ordinal >= devices)
        Refuse("no device " + std::to_string(ordinal),
               {"the HIP run-time " + library_->path() + " sees " + std::to_string(devices)});
    library_->Check(library_->api().hipDeviceGetAttribute(
                        &compute_units_, hip::kAttributeMultiprocessorCount, ordinal),
                    "hipDeviceGetAttribute");
    const CurrentDevice current(*library_, ordinal);
    try {
        Load();
    } catch (...) {
        Unload();
        throw;
    }
}

Device::~Device() {
    try {
        const CurrentDevice current(*library_, ordinal_);
        Unload();
    } catch (const hip::CallFailed&) {
        // The run-time has been shut down before this object: its modules are gone with it.
    }
}

void Device::Load() {
    for (const CodeObject& object : objects_) {
        hip::Module module = nullptr;
        library_->Check(library_->api().hipModuleLoadData(&module, object.image.data()),
                        "hipModuleLoadData of " + object.file, true);
        modules_.push_back(module);
        for (const CodeObject::Kernel& kernel : object.kernels) {
            const auto* expected = std::find_if(
                std::begin(kExpected), std::end(kExpected),
                [&](const Expected& candidate) { return kernel.name == candidate.name; });
            if (expected == std::end(kExpected)) continue;
            Kernel& made = kernels_[static_cast<size_t>(expected - kExpected)];
            made.name = expected->name;
            made.threads = expected->threads;
            library_->Check(
                library_->api().hipModuleGetFunction(&made.function, module, expected->name),
                "hipModuleGetFunction of " + kernel.name + " in " + object.file);
        }
    }
}

void Device::Unload() {
    for (hip::Module module : modules_) library_->api().hipModuleUnload(module);
    modules_.clear();
}

void Device::Launch(const Kernel& kernel, int64_t grid, const void* params, size_t bytes,
                    hip::Stream stream) const {
    void* extra[] = {hip::kLaunchBufferPointer, const_cast<void*>(params), hip::kLaunchBufferSize,
                     &bytes, hip::kLaunchBufferEnd};
    const hip::Error error =
        library_->api().hipModuleLaunchKernel(kernel.function, static_cast<unsigned>(grid), 1, 1,
                                              kernel.threads, 1, 1, 0, stream, nullptr, extra);
    if (error != 0) library_->Check(error, std::string("launch of ") + kernel.name, true);
}

void Device::TransposeV(const DenseShape& shape, int64_t grid, const DenseRequest& request,
                        uint16_t* v_t, hip::Stream stream) const {
    TransposeVParams params{};
    params.v = request.v;
    params.v_t = v_t;
    params.v_strides = request.v_strides;
    params.batch = Int(shape.batch);
    params.kv_heads = Int(shape.kv_heads);
    params.kv_len = Int(shape.kv_len);
    Launch(kTranspose + (shape.head_dim == 128), grid, params, stream);
}

void Device::Attention(const DensePlan& plan, const DenseRequest& request, void* workspace,
                       hip::Stream stream) const {
    const DenseShape& s = plan.shape;
    std::vector<std::string> reasons;
    CheckTensors(reasons, s, request, workspace);
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot take these tensors", reasons);

    char* const base = static_cast<char*>(workspace);
    auto* const v_t = reinterpret_cast<uint16_t*>(base + plan.v_t_offset);
    const bool split = plan.tail_tiles > 0;
    auto* const part_out = split ? reinterpret_cast<float*>(base + plan.part_out_offset) : nullptr;
    auto* const part_stats =
        split ? reinterpret_cast<float*>(base + plan.part_stats_offset) : nullptr;

    const CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_);
    TouchTensors(touched, s, request);
    // Buffer by buffer, so that running over one into the padding behind it is found, too.
    touched.Add("the workspace", v_t, VtBytes(s.batch, s.kv_heads, s.kv_len, s.head_dim));
    touched.Add("the workspace", part_out, PartOutBytes(plan.tail_tiles, plan.splits, s.head_dim));
    touched.Add("the workspace", part_stats, PartStatsBytes(plan.tail_tiles, plan.splits));

    TransposeV(s, plan.transpose_grid, request, v_t, stream);

    auto dense = AttentionParams<DenseParams>(s, request, v_t);
    dense.part_out = part_out;
    dense.part_stats = part_stats;
    dense.whole_tiles = Int(plan.whole_tiles);
    dense.splits = Int(plan.splits);
    dense.mapping = Int(static_cast<int64_t>(plan.mapping));
    Launch(kDense + Variant(s.head_dim, request.number), plan.dense_grid, dense, stream);

    if (!split) return;
    MergeParams merge{};
    merge.part_out = part_out;
    merge.part_stats = part_stats;
    merge.out = request.out;
    merge.lse = request.lse;
    merge.out_strides = request.out_strides;
    merge.batch = Int(s.batch);
    merge.q_heads = Int(s.q_heads);
    merge.q_len = Int(s.q_len);
    merge.head_dim = Int(s.head_dim);
    merge.whole_tiles = Int(plan.whole_tiles);
    merge.splits = Int(plan.splits);
    merge.mapping = Int(static_cast<int64_t>(plan.mapping));
    Launch(kMerge + static_cast<int>(request.number), plan.merge_grid, merge, stream);
}

void Device::Lite(const LitePlan& plan, const DenseRequest& request, const LiteStep& step,
                  void* workspace, hip::Stream stream) const {
    const DenseShape& s = plan.shape;
    std::vector<std::string> reasons;
    CheckTensors(reasons, s, request, workspace);
    if (!step.read) reasons.emplace_back("read has no memory");
    if (!step.write) reasons.emplace_back("write has no memory");
    if (!(step.threshold <= 0.0))
        reasons.push_back("threshold must be <= 0, got " + std::to_string(step.threshold));
    const int64_t rows = s.batch * s.q_heads, q_blocks = QBlocks(s.q_len);
    const int64_t mask_bytes = plan.words * 4, list_bytes = rows * q_blocks * mask_bytes;
    // Workgroups write rows of it while others have yet to read theirs.
    const int64_t apart =
        reinterpret_cast<intptr_t>(step.write) - reinterpret_cast<intptr_t>(step.read);
    if (step.read && step.write && -list_bytes < apart && apart < list_bytes)
        reasons.emplace_back("write must not overlap read");
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot take these tensors", reasons);

    char* const base = static_cast<char*>(workspace);
    auto* const v_t = reinterpret_cast<uint16_t*>(base + plan.v_t_offset);
    auto* const order =
        plan.lpt_grid ? reinterpret_cast<int32_t*>(base + plan.order_offset) : nullptr;

    const CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_);
    TouchTensors(touched, s, request);
    touched.Add("read", step.read, list_bytes);
    touched.Add("write", step.write, list_bytes);
    touched.Add("must_do", step.must_do, mask_bytes);
    touched.Add("must_skip", step.must_skip, mask_bytes);
    touched.Add("the workspace", v_t, VtBytes(s.batch, s.kv_heads, s.kv_len, s.head_dim));
    touched.Add("the workspace", order, rows * q_blocks * 4);

    TransposeV(s, plan.transpose_grid, request, v_t, stream);

    if (order) {
        PlanParams lpt{};
        lpt.skip = step.read;
        lpt.must_do = step.must_do;
        lpt.must_skip = step.must_skip;
        lpt.order = order;
        lpt.rows = Int(rows);
        lpt.q_blocks = Int(q_blocks);
        lpt.words = Int(plan.words);
        lpt.k_blocks = Int(KBlocks(s.kv_len));
        Launch(kLpt, plan.lpt_grid, lpt, stream);
    }

    auto lite = AttentionParams<LiteParams>(s, request, v_t);
    lite.read = step.read;
    lite.write = step.write;
    lite.must_do = step.must_do;
    lite.must_skip = step.must_skip;
    lite.order = order;
    lite.threshold = static_cast<float>(step.threshold);
    lite.descending = step.descending;
    lite.soft_skip = step.soft_skip;
    lite.mapping = Int(static_cast<int64_t>(Mapping::kSwizzledHeadFirst));
    Launch(kLite + Variant(s.head_dim, request.number), plan.lite_grid, lite, stream);
}

void Device::PlanLpt(const LptRequest& request, hip::Stream stream) const {
    std::vector<std::string> reasons;
    const auto positive = [&](const char* name, int64_t value) {
        if (value < 1 || value > std::numeric_limits<int32_t>::max())
            reasons.push_back(std::string(name) + " must be from 1 to 2^31 - 1, got " +
                              std::to_string(value));
    };
    positive("rows", request.rows);
    positive("q_blocks", request.q_blocks);
    positive("words", request.words);
    if (request.k_blocks &&
        (request.k_blocks < 0 || SkipWords(kKBlock * request.k_blocks) != request.words))
        reasons.push_back(std::to_string(request.k_blocks) + " K blocks do not fill " +
                          std::to_string(request.words) + " words");
    if (!request.skip) reasons.emplace_back("skip has no memory");
    if (!request.order) reasons.emplace_back("order has no memory");
    const int64_t grid = reasons.empty() ? PlanGrid(request.rows, request.q_blocks) : 0;
    if (grid > MaxGrid(kPlanThreads))
        reasons.emplace_back("its q blocks must be fewer than 2^32 threads");
    if (!reasons.empty()) Refuse("no LPT order for this bitmap", reasons);

    const CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_);
    const int64_t mask_bytes = request.words * 4;
    touched.Add("skip", request.skip, request.rows * request.q_blocks * mask_bytes);
    touched.Add("must_do", request.must_do, mask_bytes);
    touched.Add("must_skip", request.must_skip, mask_bytes);
    touched.Add("order", request.order, request.rows * request.q_blocks * 4);
    PlanParams params{};
    params.skip = request.skip;
    params.must_do = request.must_do;
    params.must_skip = request.must_skip;
    params.order = request.order;
    params.rows = static_cast<int32_t>(request.rows);
    params.q_blocks = static_cast<int32_t>(request.q_blocks);
    params.words = static_cast<int32_t>(request.words);
    params.k_blocks = static_cast<int32_t>(request.k_blocks);
    Launch(kLpt, grid, params, stream);
}

void Device::Ragged(const RaggedPlan& plan, const RaggedRequest& request, void* workspace,
                    hip::Stream stream) const {
    const RaggedShape& s = plan.shape;
    if (plan.decode_grid == 0 && plan.prefill_grid == 0) return;
    const bool paged = s.page_size > 0, split = plan.merge_grid > 0;
    std::vector<std::string> reasons;
    const auto needed = [&](const char* name, const void* pointer) {
        if (!pointer) reasons.push_back(std::string(name) + " has no memory");
    };
    CheckRows(reasons, "q", request.q, request.q_strides, s.rows, s.q_heads);
    CheckRows(reasons, "out", request.out, request.out_strides, s.rows, s.q_heads);
    if (request.pages > 0 && request.page_rows > 0) {
        CheckPages(reasons, "k", request.k, request.k_strides, request.pages, request.page_rows,
                   s.kv_heads);
        CheckPages(reasons, "v", request.v, request.v_strides, request.pages, request.page_rows,
                   s.kv_heads);
    }
    needed("q_start", request.q_start);
    if (paged) {
        needed("kv_len", request.kv_len);
        needed("page_table", request.page_table);
    } else {
        needed("kv_start", request.kv_start);
    }
    if (split && (!workspace || reinterpret_cast<uintptr_t>(workspace) % 16 != 0))
        reasons.emplace_back("the workspace must be 16-byte aligned memory");
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot take these tensors", reasons);

    char* const base = static_cast<char*>(workspace);
    const double log2_scale = request.scale * std::numbers::log2e;
    const Divider pages = DividerOf(Int(s.page_size));
    const Divider group = DividerOf(Int(s.q_heads / s.kv_heads));
    RaggedParams params{};
    params.q = request.q;
    params.k = request.k;
    params.v = request.v;
    params.out = request.out;
    params.lse = request.lse;
    params.sinks = request.sinks;
    params.q_start = request.q_start;
    params.kv_len = request.kv_len;
    params.kv_start = request.kv_start;
    params.page_table = request.page_table;
    if (split) {
        params.part_out = reinterpret_cast<float*>(base + plan.part_out_offset);
        params.part_stats = reinterpret_cast<float*>(base + plan.part_stats_offset);
    }
    params.q_strides = request.q_strides;
    params.out_strides = request.out_strides;
    params.k_strides = request.k_strides;
    params.v_strides = request.v_strides;
    params.page_table_stride = request.page_table_stride;
    params.lse_stride = s.rows;
    params.requests = Int(s.requests);
    params.rows = Int(s.rows);
    params.q_heads = Int(s.q_heads);
    params.kv_heads = Int(s.kv_heads);
    params.page_size = Int(s.page_size);
    params.page_multiplier = pages.multiplier;
    params.page_shift = pages.shift;
    params.causal = request.causal;
    params.window = Int(s.window);
    params.splits = Int(plan.splits);
    params.scale_log2 = static_cast<float>(log2_scale);
    if (request.soft_cap > 0.0) {
        params.cap_log2 = static_cast<float>(request.soft_cap * std::numbers::log2e);
        params.cap_factor = static_cast<float>(2.0 * log2_scale / request.soft_cap);
    }
    params.head_dim = Int(s.head_dim);
    params.group_multiplier = group.multiplier;
    params.group_shift = group.shift;

    const CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_);
    touched.Add("q", request.q, request.q_strides, s.rows, s.q_heads, s.head_dim);
    touched.Add("out", request.out, request.out_strides, s.rows, s.q_heads, s.head_dim);
    if (request.pages > 0 && request.page_rows > 0) {
        touched.Add("k", request.k, request.k_strides, request.pages, request.page_rows, s.kv_heads,
                    s.head_dim);
        touched.Add("v", request.v, request.v_strides, request.pages, request.page_rows, s.kv_heads,
                    s.head_dim);
    }
    touched.Add("lse", request.lse, s.q_heads * s.rows * 4);
    touched.Add("sinks", request.sinks, s.q_heads * 4);
    touched.Add("q_start", request.q_start, (s.requests + 1) * 4);
    touched.Add("kv_len", request.kv_len, s.requests * 4);
    touched.Add("kv_start", request.kv_start, (s.requests + 1) * 4);
    if (request.table_width > 0)
        touched.Add("page_table", request.page_table,
                    ((s.requests - 1) * request.page_table_stride + request.table_width) * 4);
    const int64_t parts = DecodeParts(s.requests, s.kv_heads, plan.splits);
    touched.Add("the workspace", params.part_out, DecodeOutBytes(parts, s.head_dim));
    touched.Add("the workspace", params.part_stats, DecodeStatsBytes(parts));

    // Each kernel leaves the other's requests alone, so their order is free.
    const int variant = Variant(s.head_dim, request.number);
    if (plan.prefill_grid > 0) Launch(kPrefill + variant, plan.prefill_grid, params, stream);
    if (plan.decode_grid > 0) Launch(kDecode + variant, plan.decode_grid, params, stream);
    if (split)
        Launch(kMergeDecode + static_cast<int>(request.number), plan.merge_grid, params, stream);
}

void Device::WriteKv(const WriteKvRequest& request, hip::Stream stream) const {
    if (request.rows == 0) return;
    std::vector<std::string> reasons;
    CheckRows(reasons, "k", request.k, request.k_strides, request.rows, request.kv_heads);
    CheckRows(reasons, "v", request.v, request.v_strides, request.rows, request.kv_heads);
    CheckPages(reasons, "k_cache", request.k_cache, request.k_cache_strides, request.pages,
               request.page_size, request.kv_heads);
    CheckPages(reasons, "v_cache", request.v_cache, request.v_cache_strides, request.pages,
               request.page_size, request.kv_heads);
    if (!request.slots) reasons.emplace_back("slots has no memory");
    if (request.head_dim < kMergeVector || request.head_dim % kMergeVector)
        reasons.push_back("head dim must be a multiple of " + std::to_string(kMergeVector) +
                          ", got " + std::to_string(request.head_dim));
    if (static_cast<__int128>(request.pages) * request.page_size > int64_t{1} << 31)
        reasons.emplace_back("the cache must hold at most 2^31 tokens");
    if (static_cast<__int128>(request.rows) * request.kv_heads * request.head_dim / kMergeVector >
        MaxGrid(1))
        reasons.emplace_back("its elements must be fewer than 8 times 2^32");
    if (!reasons.empty()) Refuse("the gfx942 kernels cannot write this cache", reasons);

    const Divider pages = DividerOf(Int(request.page_size));
    WriteKvParams params{};
    params.k = request.k;
    params.v = request.v;
    params.k_cache = request.k_cache;
    params.v_cache = request.v_cache;
    params.slots = request.slots;
    params.k_strides = request.k_strides;
    params.v_strides = request.v_strides;
    params.k_cache_strides = request.k_cache_strides;
    params.v_cache_strides = request.v_cache_strides;
    params.rows = Int(request.rows);
    params.kv_heads = Int(request.kv_heads);
    params.head_dim = Int(request.head_dim);
    params.page_size = Int(request.page_size);
    params.page_multiplier = pages.multiplier;
    params.page_shift = pages.shift;
    params.wide = request.wide;

    const CurrentDevice current(*library_, ordinal_);
    TouchedMemory touched(*library_);
    touched.Add("k", request.k, request.k_strides, request.rows, request.kv_heads,
                request.head_dim);
    touched.Add("v", request.v, request.v_strides, request.rows, request.kv_heads,
                request.head_dim);
    touched.Add("k_cache", request.k_cache, request.k_cache_strides, request.pages,
                request.page_size, request.kv_heads, request.head_dim);
    touched.Add("v_cache", request.v_cache, request.v_cache_strides, request.pages,
                request.page_size, request.kv_heads, request.head_dim);
    touched.Add("slots", request.slots, request.rows * (request.wide ? 8 : 4));
    Launch(kWriteKv, WriteKvGrid(request.rows, request.kv_heads, request.head_dim), params, stream);
}

}  // namespace liteattention::gfx942
