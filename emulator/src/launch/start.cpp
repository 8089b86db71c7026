#include "launch/start.h"

#include <algorithm>

#include "check/checker.h"

namespace emulator {
namespace {

// Kernel descriptor, kernel_code_properties.
constexpr uint32_t kPrivateSegmentBuffer = 1, kDispatchPtr = 2, kQueuePtr = 4, kKernargPtr = 8,
                   kDispatchId = 16, kFlatScratchInit = 32, kPrivateSegmentSize = 64;

}  // namespace

void start(Wave& wave, const Dispatch& dispatch, const Workgroup& group) {
    const Kernel& kernel = *dispatch.launch.kernel;
    Checker* check = wave.check;
    const uint32_t total = kernel.allocated_vgprs(), arch = std::min(kernel.accum_offset(), total);
    std::fill_n(&wave.v[0][0], size_t{std::min(arch, 256u)} * kLanes, kPoison);
    std::fill_n(&wave.v[256][0], size_t{std::min(total - arch, 256u)} * kLanes, kPoison);
    std::fill_n(wave.s, kScalarRegisters, kPoison);
    wave.pc = static_cast<uint32_t>(dispatch.launch.object->code(*dispatch.launch.kernel)
                                        .at(kernel.entry + (kernel.preload_dwords ? 256 : 0)));
    wave.scc = false;
    wave.status = Status::running;
    wave.mode = (kernel.rsrc1 >> 12 & 0xff) | (kernel.rsrc1 >> 21 & 1) << 8 |
                (kernel.rsrc1 >> 23 & 1) << 9 | (kernel.rsrc1 >> 26 & 1) << 23;
    wave.executed = 0;

    int next = 0;
    auto scalar = [&](uint32_t value) {
        wave.s[next] = value;
        if (check) check->define_scalar(wave, next, 1);
        ++next;
    };
    auto pair = [&](uint64_t value) {
        scalar(static_cast<uint32_t>(value));
        scalar(static_cast<uint32_t>(value >> 32));
    };
    const uint32_t properties = kernel.properties;
    if (properties & kPrivateSegmentBuffer) pair(0), pair(0);
    if (properties & kDispatchPtr) pair(dispatch.packet);
    if (properties & kQueuePtr) pair(dispatch.queue);
    if (properties & kKernargPtr) pair(dispatch.kernarg);
    if (properties & kDispatchId) pair(0);
    if (properties & kFlatScratchInit) pair(reinterpret_cast<uint64_t>(wave.scratch));
    if (properties & kPrivateSegmentSize) scalar(kernel.scratch_bytes);
    for (uint32_t i = 0; i < kernel.preload_dwords && next < 16; ++i) {
        const uint64_t at = dispatch.kernarg + 4ull * (kernel.preload_offset + i);
        if (dispatch.memory.written(at, 4))
            scalar(*reinterpret_cast<const uint32_t*>(at));
        else
            ++next;
    }
    next = static_cast<int>(kernel.rsrc2 >> 1 & 31);
    for (int axis = 0; axis < 3; ++axis)
        if (kernel.rsrc2 >> (7 + axis) & 1) scalar(group.id[axis]);
    if (kernel.rsrc2 >> 10 & 1) scalar(0);
    // Architected flat scratch: no wave offset SGPR, FLAT_SCRATCH is set.
    wave.set_pair(kFlatScratch, reinterpret_cast<uint64_t>(wave.scratch));

    const uint32_t first = wave.id * kLanes;
    const uint32_t lanes = std::min<uint32_t>(kLanes, dispatch.work_items - first);
    wave.set_pair(kExec, lanes == 64 ? ~uint64_t{0} : (uint64_t{1} << lanes) - 1);
    const uint32_t* block = dispatch.launch.block;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const uint32_t item = first + lane;
        wave.v[0][lane] = item % block[0] | item / block[0] % block[1] << 10 |
                          item / (block[0] * block[1]) % 1024 << 20;
    }
    if (check) {
        check->define_scalar(wave, kFlatScratch, 2);
        check->define_scalar(wave, kExec, 2);
        check->define_vector(wave, 0, 1);
    }
}

}  // namespace emulator
