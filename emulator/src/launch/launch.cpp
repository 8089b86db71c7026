#include "launch/launch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "check/checker.h"
#include "exec/exec.h"
#include "launch/kernarg.h"
#include "launch/start.h"
#include "launch/waves.h"

namespace emulator {
namespace {

constexpr uint32_t kMaxLds = 65536;
constexpr uint32_t kMaxWorkgroup = 1024;

// What one host thread needs to run workgroups one after another.
class Worker {
   public:
    Worker(const Dispatch& dispatch, GlobalRaces& races)
        : dispatch_(dispatch), races_(races), waves_(new Wave[dispatch.wave_count]) {
        const Kernel& kernel = *dispatch.launch.kernel;
        // A function that the compiler does not see through gets the stack that hardware queues
        // give.
        scratch_bytes_ = kernel.scratch_bytes;
        if (kernel.dynamic_stack) scratch_bytes_ = std::max(scratch_bytes_, 16384u);
        scratch_.resize(size_t{scratch_bytes_} * kLanes * dispatch.wave_count);
        if (dispatch.options.count)
            counters_ = Counters::of(dispatch.launch.object->code(*dispatch.launch.kernel));
        for (uint32_t i = 0; i < dispatch.wave_count; ++i) {
            Wave& wave = waves_[i];
            wave.id = static_cast<uint16_t>(i);
            wave.code = &dispatch.launch.object->code(*dispatch.launch.kernel);
            wave.group = &group_;
            wave.memory = &dispatch.memory;
            wave.counters = dispatch.options.count ? &counters_ : nullptr;
            wave.scratch = scratch_.data() + size_t{i} * scratch_bytes_ * kLanes;
            wave.scratch_bytes = scratch_bytes_;
            group_.waves.push_back(&wave);
        }
    }

    // False when the launch should stop.
    bool run(uint64_t linear) {
        const uint32_t* grid = dispatch_.launch.grid;
        group_.linear_id = linear;
        group_.id[0] = static_cast<uint32_t>(linear % grid[0]);
        group_.id[1] = static_cast<uint32_t>(linear / grid[0] % grid[1]);
        group_.id[2] = static_cast<uint32_t>(linear / grid[0] / grid[1]);
        group_.lds.assign(dispatch_.lds_bytes, 0);
        counters_.begin_workgroup();
        poison(group_.lds);
        poison(scratch_);
        std::unique_ptr<Checker> check;
        if (dispatch_.options.check)
            check = std::make_unique<Checker>(group_, dispatch_.memory, dispatch_.report.findings,
                                              &accesses_);
        accesses_.begin(static_cast<uint32_t>(linear));
        for (Wave* wave : group_.waves) {
            wave->check = check.get();
            start(*wave, dispatch_, group_);
        }
        // One worker alone runs the workgroup, so that it may write to the report.
        if (dispatch_.options.record == linear) {
            dispatch_.report.recording = std::make_unique<Recorder>(linear, group_.waves.size());
            counters_.recorder = dispatch_.report.recording.get();
        }
        const bool done = run_waves(group_, check.get(), dispatch_.launch.object, dispatch_.options,
                                    dispatch_.report, instructions_);
        counters_.recorder = nullptr;
        if (!done) return false;
        if (check) races_.join(accesses_);
        return true;
    }

    const Counters& counters() const { return counters_; }
    uint64_t instructions() const { return instructions_; }

   private:
    static void poison(std::vector<uint8_t>& bytes) {
        size_t i = 0;
        for (; i + 4 <= bytes.size(); i += 4) std::memcpy(&bytes[i], &kPoison, 4);
        for (; i < bytes.size(); ++i) bytes[i] = 0xf5;
    }

    const Dispatch& dispatch_;
    GlobalRaces& races_;
    GlobalAccesses accesses_;
    std::unique_ptr<Wave[]> waves_;
    std::vector<uint8_t> scratch_;
    uint32_t scratch_bytes_ = 0;
    Workgroup group_;
    Counters counters_;
    uint64_t instructions_ = 0;
};

}  // namespace

std::string objections(const Launch& launch) {
    const Kernel& kernel = *launch.kernel;
    std::string out;
    auto object = [&](const std::string& reason) { out += kernel.name + ": " + reason + "\n"; };
    uint64_t items = 1, groups = 1;
    bool empty = false;
    for (int axis = 0; axis < 3; ++axis) {
        empty |= launch.block[axis] == 0 || launch.grid[axis] == 0;
        items *= std::min(launch.block[axis], 1u << 20);
        groups *= launch.grid[axis];
        const uint32_t required = kernel.required_workgroup[axis];
        if (required && required != launch.block[axis])
            object("workgroup size " + std::to_string(launch.block[axis]) + " on axis " +
                   std::to_string(axis) + " is not the required " + std::to_string(required));
    }
    if (empty) object("grid and block must be at least 1 on every axis");
    const uint32_t most = std::min(kernel.max_workgroup, kMaxWorkgroup);
    if (items > most)
        object("workgroup of " + std::to_string(items) + " work-items, at most " +
               std::to_string(most));
    if (launch.dynamic_lds > kMaxLds || kernel.lds_bytes + launch.dynamic_lds > kMaxLds)
        object("needs " + std::to_string(uint64_t{kernel.lds_bytes} + launch.dynamic_lds) +
               " bytes of LDS, there are 65536");
    if (!kernel.unimplemented.empty()) {
        std::string names;
        for (const std::string& name : kernel.unimplemented)
            names += (names.empty() ? "" : ", ") + name;
        object("uses instructions that are not emulated: " + names);
    }
    // A wave that names a register it does not have faults, or changes another wave's. VGPRs may
    // go on past accum_offset: there they are the AGPRs by another name.
    const uint32_t total = kernel.allocated_vgprs(), arch = std::min(kernel.accum_offset(), total);
    if (kernel.named_vgprs > total || kernel.named_agprs > total - arch)
        object("names " + std::to_string(kernel.named_vgprs) + " VGPRs and " +
               std::to_string(kernel.named_agprs) + " AGPRs, its descriptor allocates " +
               std::to_string(arch) + " and " + std::to_string(total - arch));
    return out;
}

void run(const Launch& launch, Memory& memory, const Options& options, Report& report) {
    const Kernel& kernel = *launch.kernel;
    const auto begin = std::chrono::steady_clock::now();

    std::vector<uint8_t> queue(4096, 0);
    const std::vector<uint8_t> arguments =
        kernarg_segment(launch, reinterpret_cast<uint64_t>(queue.data()));
    const size_t align = std::max<size_t>(64, kernel.kernarg_align);
    std::unique_ptr<uint8_t, void (*)(void*)> segment(
        static_cast<uint8_t*>(
            std::aligned_alloc(align, (arguments.size() + align - 1) / align * align)),
        std::free);
    std::copy(arguments.begin(), arguments.end(), segment.get());
    const auto kernarg = reinterpret_cast<uint64_t>(segment.get());

    alignas(64) DispatchPacket packet{};
    packet.setup = 3;
    for (int axis = 0; axis < 3; ++axis) {
        packet.workgroup_size[axis] = static_cast<uint16_t>(launch.block[axis]);
        packet.grid_size[axis] = launch.grid[axis] * launch.block[axis];
    }
    packet.private_bytes = kernel.scratch_bytes;
    packet.lds_bytes = kernel.lds_bytes + launch.dynamic_lds;
    packet.kernarg = kernarg;

    std::vector<std::unique_ptr<Range>> ranges;
    const auto reachable = [&](const void* begin, size_t bytes, Contents contents) {
        ranges.push_back(std::make_unique<Range>(memory, begin, bytes, contents));
    };
    for (const Segment& part : launch.object->segments())
        reachable(part.begin, part.bytes, {.constant = !part.writable});
    reachable(queue.data(), queue.size(), {});
    reachable(&packet, sizeof packet, {.constant = true});
    reachable(segment.get(), arguments.size(), {.tracked = true, .constant = true});
    mark_arguments(memory, launch, kernarg);

    const uint32_t items = launch.block[0] * launch.block[1] * launch.block[2];
    const Dispatch dispatch{launch,
                            options,
                            memory,
                            report,
                            kernarg,
                            reinterpret_cast<uint64_t>(&packet),
                            reinterpret_cast<uint64_t>(queue.data()),
                            items,
                            (items + kLanes - 1) / kLanes,
                            packet.lds_bytes};
    const uint64_t total = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    unsigned threads = options.threads ? options.threads : std::thread::hardware_concurrency();
    threads = static_cast<unsigned>(std::clamp<uint64_t>(threads, 1, total));

    if (options.count) report.counters = Counters::of(launch.object->code());
    GlobalRaces races(launch.object->code(kernel), report.findings);
    std::atomic<uint64_t> next{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    std::exception_ptr error;
    auto work = [&] {
        try {
            Worker worker(dispatch, races);
            while (!stop.load(std::memory_order_relaxed)) {
                const uint64_t linear = next.fetch_add(1, std::memory_order_relaxed);
                if (linear >= total) break;
                if (!worker.run(linear)) stop = true;
            }
            const std::lock_guard lock(mutex);
            if (options.count) report.counters.add(worker.counters());
            report.instructions += worker.instructions();
        } catch (...) {
            const std::lock_guard lock(mutex);
            error = std::current_exception();
            stop = true;
        }
    };
    std::vector<std::thread> pool;
    for (unsigned i = 1; i < threads; ++i) pool.emplace_back(work);
    work();
    for (std::thread& thread : pool) thread.join();
    if (error) std::rethrow_exception(error);
    report.checked = options.check;
    if (options.check) report.stored = races.stored();
    report.counters.count_flops(launch.object->code());
    report.workgroups = total;
    report.waves = total * dispatch.wave_count;
    report.threads = threads;
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void run_bare(const CodeObject* object, const Code& code, std::vector<Wave*> waves,
              std::vector<uint8_t>& lds, Memory& memory, const Options& options, Report& report) {
    const auto begin = std::chrono::steady_clock::now();
    if (options.count) report.counters = Counters::of(code);
    if (options.record == 0) {
        report.recording = std::make_unique<Recorder>(0, waves.size());
        report.counters.recorder = report.recording.get();
    }
    Workgroup group;
    group.lds.swap(lds);
    group.waves = std::move(waves);
    std::unique_ptr<Checker> check;
    if (options.check) check = std::make_unique<Checker>(group, memory, report.findings, nullptr);
    if (check) check->define_lds();
    for (size_t i = 0; i < group.waves.size(); ++i) {
        Wave& wave = *group.waves[i];
        wave.id = static_cast<uint16_t>(i);
        wave.code = &code;
        wave.group = &group;
        wave.memory = &memory;
        wave.check = check.get();
        wave.counters = options.count ? &report.counters : nullptr;
        if (!check) continue;
        check->define_scalar(wave, 0, kScalarRegisters);
        check->define_vector(wave, 0, kVectorRegisters);
    }
    run_waves(group, check.get(), object, options, report, report.instructions);
    report.counters.recorder = nullptr;
    report.counters.count_flops(code);
    lds.swap(group.lds);
    for (Wave* wave : group.waves) wave->check = nullptr;
    report.workgroups = 1;
    report.waves = group.waves.size();
    report.threads = 1;
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace emulator
