#include "record/recorder.h"

namespace emulator {

void Recorder::lds(uint32_t bytes, int phases, int conflicts) {
    open_.bytes += bytes;
    open_.phases = static_cast<uint16_t>(open_.phases + phases);
    open_.conflicts = static_cast<uint16_t>(open_.conflicts + conflicts);
}

void Recorder::memory(uint32_t bytes, std::span<const uint64_t> lines) {
    open_.bytes += bytes;
    open_.lines = static_cast<uint16_t>(open_.lines + lines.size());
    lines_.insert(lines_.end(), lines.begin(), lines.end());
}

void Recorder::executed(size_t wave, uint32_t index, bool taken) {
    WaveStream& stream = streams_[wave];
    open_.index = index;
    open_.taken = taken;
    stream.steps.push_back(open_);
    stream.lines.insert(stream.lines.end(), lines_.begin(), lines_.end());
    open_ = Step{};
    lines_.clear();
}

}  // namespace emulator
