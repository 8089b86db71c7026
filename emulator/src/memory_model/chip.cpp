#include "memory_model/chip.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <queue>
#include <sstream>
#include <stdexcept>

#include "memory_model/block_cache.h"

namespace emulator {
namespace {

constexpr double kMostPrefetch = 15;

// One transfer after the other at a rate.
struct Queue {
    double rate, free = 0;
    double done(double now, double bytes) { return free = std::max(free, now) + bytes / rate; }
};

uint64_t sets_of(double capacity, double ways, double block) {
    return static_cast<uint64_t>(std::max(1.0, std::floor(capacity / (ways * block))));
}

class Chip {
   public:
    Chip(const ChipParameters& chip, const BlockReads* workgroups, size_t count, size_t warm_up,
         bool stop_at_drain)
        : chip_(chip),
          workgroups_(workgroups),
          count_(count),
          warm_up_(warm_up),
          stop_at_drain_(stop_at_drain),
          depth_(static_cast<uint32_t>(chip.prefetch)),
          seed_(mixed(static_cast<uint64_t>(chip.seed))),
          cache_(sets_of(chip.cache_bytes, chip.cache_ways, chip.block_bytes),
                 static_cast<uint32_t>(chip.cache_ways)),
          cache_queue_{chip.cache_rate},
          hbm_queue_{chip.hbm_rate} {
        const auto xcds = static_cast<uint32_t>(chip.xcds);
        const auto cus = static_cast<uint32_t>(chip.cus_per_xcd);
        const auto residency = static_cast<uint32_t>(chip.residency);
        for (uint32_t x = 0; x < xcds; ++x) {
            xcds_.push_back({BlockCache(sets_of(chip.l2_bytes, chip.l2_ways, chip.block_bytes),
                                        static_cast<uint32_t>(chip.l2_ways)),
                             Queue{chip.link_rate}, x, 0});
        }
        units_.resize(size_t{xcds} * cus, Unit{Queue{chip.cu_rate}, 0});
        // One workgroup for every compute unit before any gets a second one, XCDs in turns.
        for (uint32_t r = 0; r < residency; ++r)
            for (uint32_t cu = 0; cu < cus; ++cu)
                for (uint32_t x = 0; x < xcds; ++x) slots_.push_back({x, x * cus + cu});
        counts_.l2.resize(xcds);
    }

    ChipCounts run() {
        counting_ = warm_up_ == 0;
        for (uint32_t slot = 0; slot < slots_.size(); ++slot) start_next(slot, 0);
        double now = 0;
        while (!events_.empty() && !(drained_ && stop_at_drain_)) {
            const Event event = events_.top();
            events_.pop();
            now = event.time;
            Slot& slot = slots_[event.slot];
            if (event.kind == Kind::kReady) {
                compute(event.slot, now);
                continue;
            }
            if (event.kind == Kind::kBegin && slot.workgroup == warm_up_ && !counting_) {
                counting_ = true;
                window_begin_ = now;
            }
            if (slot.step == workgroups_[slot.workgroup].count)
                start_next(event.slot, now);
            else
                advance(event.slot, now);
        }
        counts_.clocks = now - window_begin_;
        counts_.whole = !(drained_ && stop_at_drain_);
        return std::move(counts_);
    }

   private:
    struct Xcd {
        BlockCache l2;
        Queue link;
        size_t next;  // workgroup to start
        double dispatch_free;
    };
    struct Unit {
        Queue from_l2;
        double free;  // of its arithmetic
    };
    struct Slot {
        uint32_t xcd, unit;
        size_t workgroup = 0;
        uint32_t step = 0, issued = 0;
        double arrivals[static_cast<size_t>(kMostPrefetch) + 1] = {};
    };
    enum class Kind : uint8_t { kBegin, kReady, kEnd };
    struct Event {
        double time;
        uint32_t slot;
        Kind kind;
        bool operator<(const Event& other) const {  // the queue's top is the earliest
            return time != other.time ? time > other.time : slot > other.slot;
        }
    };

    // Between -1 and 1.
    double draw(size_t workgroup, uint32_t step, uint64_t what) const {
        const uint64_t bits = mixed(seed_ ^ mixed((uint64_t{workgroup} << 32 | step) * 2 + what));
        return static_cast<double>(bits >> 11) * 0x1p-52 - 1;
    }

    void start_next(uint32_t index, double now) {
        Slot& slot = slots_[index];
        Xcd& xcd = xcds_[slot.xcd];
        if (xcd.next >= count_) {
            // A launch of a few workgroups leaves slots empty from the start.
            if (now > 0) drained_ = true;
            return;
        }
        slot.workgroup = xcd.next;
        slot.step = slot.issued = 0;
        xcd.next += xcds_.size();
        ++counts_.started;
        const double begin = std::max(now + chip_.launch_clocks, xcd.dispatch_free);
        xcd.dispatch_free = begin + chip_.dispatch_clocks;
        events_.push({begin, index, Kind::kBegin});
    }

    void advance(uint32_t index, double now) {
        Slot& slot = slots_[index];
        const BlockReads& reads = workgroups_[slot.workgroup];
        const auto limit = std::min<uint64_t>(reads.count, uint64_t{slot.step} + 1 + depth_);
        for (; slot.issued < limit; ++slot.issued) {
            const uint64_t block = reads.first + reads.stride * slot.issued;
            slot.arrivals[slot.issued % (depth_ + 1)] = read(slot, block, now);
        }
        const double arrival = slot.arrivals[slot.step % (depth_ + 1)] - chip_.slack_clocks;
        if (arrival > now)
            events_.push({arrival, index, Kind::kReady});
        else
            compute(index, now);
    }

    void compute(uint32_t index, double now) {
        Slot& slot = slots_[index];
        Unit& unit = units_[slot.unit];
        const double clocks =
            chip_.compute_clocks * (1 + chip_.compute_jitter * draw(slot.workgroup, slot.step, 0));
        unit.free = std::max(unit.free, now) + clocks;
        ++slot.step;
        if (counting_) {
            ++counts_.steps;
            counts_.compute_clocks += clocks;
        }
        events_.push({unit.free, index, Kind::kEnd});
    }

    void count(LevelCounts& counts, const BlockCache::Found& found, double now) const {
        if (!counting_) return;
        ++counts.reads;
        ++(!found.hit ? counts.misses : found.arrival > now ? counts.hits_on_miss : counts.hits);
    }

    // When a block asked for now has arrived at the compute unit.
    double read(const Slot& slot, uint64_t block, double now) {
        Xcd& xcd = xcds_[slot.xcd];
        const BlockCache::Found found = xcd.l2.access(block);
        count(counts_.l2[slot.xcd], found, now);
        if (!found.hit) found.arrival = fetch(slot, xcd, block, now);
        const double wait = std::max(chip_.l2_latency, found.arrival - now);
        return wait + units_[slot.unit].from_l2.done(now, chip_.block_bytes);
    }

    // When a block asked for now has arrived in an L2 that does not have it.
    double fetch(const Slot& slot, Xcd& xcd, uint64_t block, double now) {
        const double varied = 1 + chip_.latency_jitter * draw(slot.workgroup, slot.issued, 1);
        const double through = std::max(xcd.link.done(now, chip_.block_bytes),
                                        cache_queue_.done(now, chip_.block_bytes));
        const BlockCache::Found found = cache_.access(block);
        count(counts_.cache, found, now);
        const double from_cache = now + (through + chip_.cache_latency - now) * varied;
        if (found.hit) return std::max(from_cache, found.arrival);
        const double read = std::max(through, hbm_queue_.done(now, chip_.block_bytes));
        found.arrival = now + (read + chip_.hbm_latency - now) * varied;
        return found.arrival;
    }

    const ChipParameters chip_;
    const BlockReads* workgroups_;
    size_t count_, warm_up_;
    bool stop_at_drain_, counting_ = false, drained_ = false;
    uint32_t depth_;
    uint64_t seed_;
    double window_begin_ = 0;
    std::vector<Xcd> xcds_;
    std::vector<Unit> units_;
    std::vector<Slot> slots_;
    BlockCache cache_;
    Queue cache_queue_, hbm_queue_;
    std::priority_queue<Event> events_;
    ChipCounts counts_;
};

}  // namespace

ChipParameters chip_parameters(const std::string& text) {
    std::map<std::string, double> given;
    std::string problems;
    const auto refuse = [&](const std::string& problem) {
        problems += (problems.empty() ? "" : "; ") + problem;
    };
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        const size_t equals = line.find('=');
        char* end = nullptr;
        const std::string name = line.substr(0, equals);
        const char* value = equals == std::string::npos ? "" : line.c_str() + equals + 1;
        const double number = std::strtod(value, &end);
        if (end == value || *end || !std::isfinite(number) || number < 0)
            refuse(name + " must be a number from 0 on");
        else if (!given.emplace(name, number).second)
            refuse(name + " is given twice");
    }
    ChipParameters chip;
    const auto take = [&](const char* name, double& field) {
        const auto found = given.find(name);
        if (found == given.end()) return refuse(std::string(name) + " is missing");
        field = found->second;
        given.erase(found);
    };
#define X(name) take(#name, chip.name);
#include "memory_model/parameters.def"
#undef X
    for (const auto& [name, value] : given) refuse(name + " is no parameter");
    const auto whole = [&](const char* name, double value, double least, double most) {
        if (value >= 0 && (value != std::floor(value) || value < least || value > most)) {
            std::ostringstream text;
            text << name << " must be a whole number from " << least << " to " << most;
            refuse(text.str());
        }
    };
    whole("xcds", chip.xcds, 1, 64);
    whole("cus_per_xcd", chip.cus_per_xcd, 1, 256);
    whole("residency", chip.residency, 1, 32);
    whole("l2_ways", chip.l2_ways, 1, 1024);
    whole("cache_ways", chip.cache_ways, 1, 1024);
    whole("prefetch", chip.prefetch, 0, kMostPrefetch);
    whole("seed", chip.seed, 0, 0x1p52);
    const auto positive = [&](const char* name, double value) {
        if (value == 0) refuse(std::string(name) + " must be more than 0");
    };
    positive("block_bytes", chip.block_bytes);
    positive("compute_clocks", chip.compute_clocks);
    positive("cu_rate", chip.cu_rate);
    positive("link_rate", chip.link_rate);
    positive("cache_rate", chip.cache_rate);
    positive("hbm_rate", chip.hbm_rate);
    if (chip.compute_jitter >= 1 || chip.latency_jitter >= 1) refuse("jitters must be less than 1");
    if (!problems.empty()) throw std::invalid_argument(problems);
    return chip;
}

ChipCounts run_chip(const ChipParameters& chip, const BlockReads* workgroups, size_t count,
                    size_t warm_up, bool stop_at_drain) {
    if (count == 0) throw std::invalid_argument("there is no workgroup to run");
    if (warm_up >= count) throw std::invalid_argument("warm_up must be the number of a workgroup");
    return Chip(chip, workgroups, count, warm_up, stop_at_drain).run();
}

}  // namespace emulator
