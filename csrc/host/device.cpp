// The kernels of a device: which there are, loading them, and finding one.
#include <algorithm>
#include <iterator>

#include "launch.h"
#include "tensors.h"

namespace liteattention::gfx942 {
namespace {

struct KernelType {
    Family family;
    const char* name;
    Number number;
    int64_t head_dim;  // 0: any
    Cache cache;
    unsigned threads;
    size_t argument_bytes;
};

// As variants.def names what a cache holds.
constexpr Cache kSameCache = Cache::kSame, kFp8Cache = Cache::kFp8;

#define LITE_CACHED(family, name, number, dim, cache, threads, Params) \
    {Family::family, #name, Number::k##number, dim, cache, threads, sizeof(Params)},
#define LITE_TYPE(family, name, number, dim, threads, Params) \
    LITE_CACHED(family, name, number, dim, kSameCache, threads, Params)
#define LITE_TRANSPOSE_V(name, dim) \
    LITE_TYPE(kTransposeV, name, Any, dim, kTransposeThreads, TransposeVParams)
#define LITE_ATTENTION_DENSE(name, number, dim) \
    LITE_TYPE(kDense, name, number, dim, kDenseThreads, DenseParams)
#define LITE_MERGE_PARTS(name, number) \
    LITE_TYPE(kMergeParts, name, number, 0, kMergeThreads, MergeParams)
#define LITE_COUNT_TILES(name) LITE_TYPE(kCountTiles, name, Any, 0, kPlanThreads, CountParams)
#define LITE_PLAN_LPT(name) LITE_TYPE(kPlanLpt, name, Any, 0, kPlanThreads, PlanParams)
#define LITE_PACK_LISTS(name) LITE_TYPE(kPackLists, name, Any, 0, kPackThreads, PlanParams)
#define LITE_ATTENTION_LITE(name, number, dim) \
    LITE_TYPE(kLite, name, number, dim, kDenseThreads, LiteParams)
#define LITE_ATTENTION_WEIGH(name, number, dim) \
    LITE_TYPE(kWeigh, name, number, dim, kDenseThreads, WeighParams)
#define LITE_MERGE_LISTS(name, number) \
    LITE_TYPE(kMergeLists, name, number, 0, kMergeThreads, MergeListsParams)
#define LITE_SELECT_TILES(name) LITE_TYPE(kSelectTiles, name, Any, 0, kSelectThreads, SelectParams)
#define LITE_ATTENTION_PREFILL(name, number, dim, cache) \
    LITE_CACHED(kPrefill, name, number, dim, k##cache, kDenseThreads, RaggedParams)
#define LITE_ATTENTION_DECODE(name, number, dim, cache) \
    LITE_CACHED(kDecode, name, number, dim, k##cache, kDecodeThreads, RaggedParams)
#define LITE_MERGE_DECODE(name, number) \
    LITE_TYPE(kMergeDecode, name, number, 0, kMergeRaggedThreads, RaggedParams)
#define LITE_MERGE_PREFILL(name, number) \
    LITE_TYPE(kMergePrefill, name, number, 0, kMergeRaggedThreads, RaggedParams)
#define LITE_WRITE_KV(name) LITE_TYPE(kWriteKv, name, Any, 0, kWriteKvThreads, WriteKvParams)
#define LITE_WRITE_KV_FP8(name, number) \
    LITE_CACHED(kWriteKv, name, number, 0, kFp8Cache, kWriteKvThreads, WriteKvParams)

constexpr KernelType kTypes[] = {
#include "../gfx942/variants.def"
};

}  // namespace

Device::Device(std::shared_ptr<const hip::Library> library, int ordinal,
               std::vector<CodeObject> objects)
    : library_(std::move(library)), ordinal_(ordinal), objects_(std::move(objects)) {
    std::vector<std::string> reasons;
    for (const KernelType& expected : kTypes) {
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
    kernels_.resize(std::size(kTypes));
    if (!reasons.empty()) Refuse("the code objects are not those of this build", reasons);

    const int devices = library_->DeviceCount();
    if (ordinal < 0 || ordinal >= devices)
        Refuse("no device " + std::to_string(ordinal),
               {"the HIP run-time " + library_->path() + " sees " + std::to_string(devices)});
    library_->Check(library_->api().hipDeviceGetAttribute(
                        &compute_units_, hip::kAttributeMultiprocessorCount, ordinal),
                    "hipDeviceGetAttribute");
    const hip::CurrentDevice current(*library_, ordinal);
    try {
        Load();
    } catch (...) {
        Unload();
        throw;
    }
}

Device::~Device() {
    try {
        const hip::CurrentDevice current(*library_, ordinal_);
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
                std::begin(kTypes), std::end(kTypes),
                [&](const KernelType& candidate) { return kernel.name == candidate.name; });
            if (expected == std::end(kTypes)) continue;
            Kernel& made = kernels_[static_cast<size_t>(expected - kTypes)];
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

const Device::Kernel& Device::Find(Family family, int64_t head_dim, Number number,
                                   Cache cache) const {
    for (size_t i = 0; i < kernels_.size(); ++i)
        if (kTypes[i].family == family && kTypes[i].head_dim == head_dim &&
            kTypes[i].number == number && kTypes[i].cache == cache)
            return kernels_[i];
    Refuse("no kernel for head dim " + std::to_string(head_dim), {"no plan should ask for it"});
}

}  // namespace liteattention::gfx942
