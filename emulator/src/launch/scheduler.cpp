#include "launch/scheduler.h"

namespace emulator {
namespace {

// With one half of the waves ahead, the other half gets a turn after this many instructions, so
// that a wave which spins on a word that another wave writes does come to an end.
constexpr uint64_t kAhead = uint64_t{1} << 20;

// SplitMix64 (Steele, Lea, Flood 2014).
uint64_t next_random(uint64_t& state) {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

}  // namespace

Wave* Scheduler::next(uint64_t& quantum) {
    const size_t count = waves_.size(), half = (count + 1) / 2;
    quantum = order_.quantum;
    switch (order_.kind) {
        case Order::Kind::round_robin:
            return rotate(0, count);
        case Order::Kind::random: {
            size_t runnable = 0;
            for (const Wave* wave : waves_) runnable += wave->status == Status::running;
            if (!runnable) return nullptr;
            quantum = 1 + next_random(random_) % 64;
            size_t pick = next_random(random_) % runnable;
            for (Wave* wave : waves_)
                if (wave->status == Status::running && pick-- == 0) return wave;
            return nullptr;
        }
        case Order::Kind::first_ahead:
            return ahead(0, half, half, count);
        case Order::Kind::last_ahead:
            return ahead(half, count, 0, half);
    }
    return nullptr;
}

Wave* Scheduler::rotate(size_t begin, size_t end) {
    const size_t count = end - begin;
    for (size_t i = 0; i < count; ++i) {
        const size_t at = begin + (last_ + 1 + i) % count;
        if (waves_[at]->status != Status::running) continue;
        last_ = at - begin;
        return waves_[at];
    }
    return nullptr;
}

Wave* Scheduler::ahead(size_t begin, size_t end, size_t other_begin, size_t other_end) {
    if (since_other_ < kAhead) {
        if (Wave* wave = rotate(begin, end)) {
            since_other_ += order_.quantum;
            return wave;
        }
    }
    since_other_ = 0;
    if (Wave* wave = rotate(other_begin, other_end)) return wave;
    return rotate(begin, end);
}

}  // namespace emulator
