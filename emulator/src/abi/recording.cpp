#include "abi/recording.h"

#include <optional>
#include <utility>

#include "abi/hip_types.h"
#include "abi/json.h"
#include "abi/report_json.h"
#include "abi/text.h"

namespace emulator {
namespace {

// Key: one thread. The code is copied: its module may be unloaded before anyone asks.
struct Recorded {
    std::string kernel, lines = "[]";
    uint32_t accum_offset = 0;
    std::vector<uint8_t> text;
    std::unique_ptr<Recorder> recorder;
};

Recorded& latest() {
    thread_local Recorded recorded;
    return recorded;
}

struct Wanted {
    std::optional<uint64_t> workgroup;
    std::string kernels;  // begin with this
};

Wanted& wanted() {
    thread_local Wanted wanted;
    return wanted;
}

std::vector<uint8_t> text_of_code(const Code& code) {
    const auto* begin = reinterpret_cast<const uint8_t*>(code.address);
    return {begin, begin + 4 * code.index_of.size()};
}

template <class T>
std::string place(const std::vector<T>& list) {
    return "[" + std::to_string(reinterpret_cast<uintptr_t>(list.data())) + "," +
           std::to_string(list.size()) + "]";
}

}  // namespace

Options recording(Options options, const std::string& kernel) {
    options.record.reset();
    if (kernel.starts_with(wanted().kernels)) options.record = wanted().workgroup;
    if (options.record) options.count = true;
    return options;
}

void forget_recording() {
    if (wanted().kernels.empty()) latest() = Recorded{};
}

void keep_recording(Report& report, const CodeObject& object, const Kernel& kernel) {
    if (!report.recording) return;
    keep_recording(report, object.code());
    latest().kernel = kernel.name;
    latest().lines = lines_json(object);
    latest().accum_offset = kernel.accum_offset();
}

void keep_recording(Report& report, const Code& code) {
    if (!report.recording) return;
    latest().text = text_of_code(code);
    latest().recorder = std::move(report.recording);
}

}  // namespace emulator

using namespace emulator;

// The calling thread's launches and snippets from now on record this workgroup (its linear id) and
// count; -1: none. With `kernels` only those whose names begin so do, and others leave the latest
// recording as it is.
EXPORT void lae_record(int64_t workgroup, const char* kernels) {
    wanted() = Wanted{};
    if (workgroup < 0) return;
    wanted() = {static_cast<uint64_t>(workgroup), kernels};
    if (*kernels) latest() = Recorded{};
}

// What the calling thread's latest launch or snippet recorded; {} when nothing:
//   kernel, workgroup, accum_offset (of the first AGPR among the vector registers; 0: not known)
//   text             [address, bytes] of the machine code that the steps' indices count in
//   lines            [[offset, "file:line"], ...] where a line begins
//   waves            [[address, count], [address, count]] of each one's Steps (record/recorder.h)
//                    and of the 128-byte lines that they touched
// The addresses are good until the thread's next launch.
EXPORT char* lae_recording() {
    return text_of([&] {
        const Recorded& recorded = latest();
        if (!recorded.recorder) return std::string("{}");
        Members out, waves;
        for (const WaveStream& stream : recorded.recorder->streams())
            waves.item("[" + place(stream.steps) + "," + place(stream.lines) + "]");
        out.field("kernel", quoted(recorded.kernel));
        out.field("workgroup", recorded.recorder->workgroup());
        out.field("accum_offset", recorded.accum_offset);
        out.field("text", place(recorded.text));
        out.field("lines", recorded.lines);
        out.field("waves", waves.list());
        return out.object();
    });
}
