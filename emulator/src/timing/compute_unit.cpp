#include "timing/compute_unit.h"

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <string>

#include "timing/in_flight.h"
#include "timing/lds.h"
#include "timing/scoreboard.h"
#include "timing/vector_memory.h"
#include "timing/vector_ports.h"

namespace emulator::timing {
namespace {

constexpr size_t kMostWaves = kMostWavesOfSimd * kSimds;
// Without any issue: far longer than anything takes, so that the replay does not come to its end.
constexpr int64_t kLongestPause = 10'000'000;

struct Wave {
    int id = 0;
    WaveSteps stream;
    size_t at = 0, line = 0;  // of the next step, of its first line
    double next = 0;          // may issue again
    int priority = 0;
    bool ended = false, at_barrier = false;
    State working{Cause::scalar, 0};  // while `next` has not come
    Scoreboard registers;
    InFlight memory, lds;
};

// Waves of one workgroup.
struct Group {
    size_t alive = 0, at_barrier = 0;
};

Cause work_of(Class kind) {
    switch (kind) {
        case Class::vector:
            return Cause::vector;
        case Class::packed:
            return Cause::packed;
        case Class::trans:
            return Cause::trans;
        case Class::matrix:
            return Cause::matrix;
        case Class::lds:
            return Cause::lds_issue;
        case Class::memory:
            return Cause::memory_issue;
        case Class::branch:
            return Cause::branch;
        case Class::barrier:
            return Cause::barrier;
        case Class::nop:
        case Class::sleep:
            return Cause::nop;
        default:
            return Cause::scalar;
    }
}

class ComputeUnit {
   public:
    ComputeUnit(const std::vector<Description>& code, std::span<const WaveSteps> streams,
                const Window& window, const Constants& constants)
        : code_(code),
          window_(window),
          constants_(constants),
          lds_(constants),
          memory_(constants),
          result_{.account = Account(code.size())} {
        for (int i = 0; i < kSimds; ++i) ports_.emplace_back(constants_);
        result_.issued.resize(streams.size());
        for (const WaveSteps& stream : streams)
            if (stream.workgroup >= groups_.size()) groups_.resize(stream.workgroup + 1);
        for (size_t i = 0; i < streams.size(); ++i) {
            auto wave = std::make_unique<Wave>();
            wave->id = static_cast<int>(i);
            wave->stream = streams[i];
            wave->ended = streams[i].steps.empty();
            alive_ += !wave->ended;
            groups_[streams[i].workgroup].alive += !wave->ended;
            result_.issued[i].reserve(streams[i].steps.size());
            of_simd_[i % kSimds].push_back(wave.get());
            waves_.push_back(std::move(wave));
        }
    }

    Result run() {
        const auto period = std::max<int64_t>(1, static_cast<int64_t>(constants_.issue_period));
        counting_ = window_.begin == 0;
        for (; alive_; ++now_) {
            if (now_ - issued_ > kLongestPause)
                throw std::runtime_error("the replay stands still: nothing has issued for " +
                                         std::to_string(kLongestPause) + " clk");
            for (int simd = 0; simd < kSimds; ++simd)
                if (now_ % period == simd % period) clock(simd, static_cast<double>(period));
            release_barriers();
        }
        result_.clocks = now_;
        if (counting_) result_.end = now_;
        result_.lds_busy = lds_.busy();
        result_.address_busy = memory_.busy();
        result_.l1_hits = memory_.hits();
        result_.l1_misses = memory_.misses();
        return std::move(result_);
    }

   private:
    // Issues what a SIMD can issue in this clk.
    void clock(int simd, double clocks) {
        std::vector<Wave*>& waves = of_simd_[simd];
        if (waves.empty()) return;
        std::stable_sort(waves.begin(), waves.end(), [&](const Wave* a, const Wave* b) {
            if (a->priority != b->priority) return a->priority > b->priority;
            return (a->id == last_[simd]) < (b->id == last_[simd]);
        });
        std::array<bool, kCategories> used{};
        std::array<State, kMostWaves / kSimds> states;
        for (size_t i = 0; i < waves.size(); ++i) {
            Wave& wave = *waves[i];
            states[i] = blocked(wave, simd, used);
            if (states[i].cause == Cause::none) states[i] = issue(wave, simd, used);
        }
        if (!counting_ || ports_[simd].matrix_busy(static_cast<double>(now_))) return;
        result_.account.idle(states.data(), waves.size(), clocks);
    }

    // Why a wave issues nothing in this clk; Cause::none when it issues.
    State blocked(Wave& wave, int simd, const std::array<bool, kCategories>& used) {
        const double now = static_cast<double>(now_);
        if (wave.ended) return {Cause::ended, 0};
        if (wave.at_barrier || wave.next > now) return wave.working;
        const Step& step = wave.stream.steps[wave.at];
        const Description& inst = code_[step.index];
        const auto because = [&](Cause cause) { return State{cause, step.index}; };
        if (inst.category != Category::none) {
            const Scoreboard::Need need = wave.registers.need(inst, constants_);
            if (need.at > now) return because(need.cause);
            if (used[static_cast<size_t>(inst.category)])
                return because(inst.kind == Class::matrix ? Cause::port_matrix : Cause::other_port);
        }
        switch (inst.kind) {
            case Class::lds:
                return because(lds_.refuses(simd, now) ? Cause::lds_issue : Cause::none);
            case Class::memory: {
                const bool full = wave.memory.left(now) >= constants_.vmem_queue;
                return because(full || memory_.refuses(now) ? Cause::memory_issue : Cause::none);
            }
            case Class::wait:
                if (wave.memory.left(now) > inst.vector_count) return because(Cause::wait_memory);
                if (wave.lds.left(now) > inst.lds_count) return because(Cause::wait_lds);
                return because(Cause::none);
            default:
                break;
        }
        if (inst.category != Category::vector) return because(Cause::none);
        const Cause cause = ports_[simd].refuses(inst, wave.id, now);
        if (cause == Cause::none || cause == Cause::packed_behind || cause == Cause::matrix_busy)
            return because(cause);
        if (inst.kind != Class::matrix) return because(Cause::other_port);
        return {cause, port_holder_[simd]};  // blamed is what the matrix instruction waits for
    }

    State issue(Wave& wave, int simd, std::array<bool, kCategories>& used) {
        const Step& step = wave.stream.steps[wave.at];
        const Description& inst = code_[step.index];
        if (inst.category != Category::none) used[static_cast<size_t>(inst.category)] = true;
        mark_window(wave);
        result_.issued[wave.id].push_back(issued_ = now_);
        const double taken = execute(wave, simd, inst, step);
        wave.next =
            static_cast<double>(now_) + taken + (inst.misaligned ? constants_.misaligned : 0);
        wave.working = {work_of(inst.kind), step.index};
        wave.line += step.lines;
        last_[simd] = wave.id;
        if (++wave.at == wave.stream.steps.size()) {
            wave.ended = true;
            --alive_;
            Group& group = groups_[wave.stream.workgroup];
            --group.alive;
            group.at_barrier -= wave.at_barrier;  // it is no more one of those that others wait for
        }
        return wave.working;
    }

    // Does what the instruction does. Returns for how long its wave issues nothing else.
    double execute(Wave& wave, int simd, const Description& inst, const Step& step) {
        const double now = static_cast<double>(now_);
        switch (inst.kind) {
            case Class::vector:
            case Class::packed:
            case Class::trans:
            case Class::matrix:
                return execute_vector(wave, simd, inst, step);
            case Class::scalar: {
                const double done = now + constants_.salu_issue;
                wave.registers.result(inst, done, done, done);
                return constants_.salu_issue;
            }
            case Class::lds:
                return arrive(wave, inst, wave.lds, lds_.issue(simd, step, now));
            case Class::memory: {
                const auto lines = wave.stream.lines.subspan(wave.line, step.lines);
                const uint64_t missed = memory_.misses();
                const double done = memory_.issue(inst, step, lines, now);
                if (counting_ && !inst.store)
                    fly(step.bytes, kLineBytes * static_cast<double>(memory_.misses() - missed),
                        done - now);
                if (inst.to_lds) lds_.copy(step, now);
                if (inst.flat) wave.lds.add(done);
                return arrive(wave, inst, wave.memory, done);
            }
            case Class::scalar_memory:
                return arrive(wave, inst, wave.lds, now + constants_.smem_latency);
            case Class::barrier:
                wave.at_barrier = true;
                ++groups_[wave.stream.workgroup].at_barrier;
                return constants_.salu_issue;
            case Class::branch:
                if (step.taken) return constants_.branch_taken;
                return inst.conditional ? constants_.branch_not_taken : constants_.salu_issue;
            case Class::nop:
                return constants_.wait_issue * ((inst.immediate & 15) + 1);
            case Class::sleep:
                return 64.0 * (inst.immediate & 127);
            case Class::priority:
                wave.priority = inst.immediate & 3;
                return constants_.wait_issue;
            case Class::wait:
            case Class::end:
                return constants_.wait_issue;
        }
        return constants_.salu_issue;
    }

    double execute_vector(Wave& wave, int simd, const Description& inst, const Step& step) {
        const double now = static_cast<double>(now_);
        VectorPorts& ports = ports_[simd];
        const double before = ports.stretched();
        const double taken = ports.issue(inst, wave.id, now);
        if (counting_)
            result_.account.add({Cause::stretch, step.index}, ports.stretched() - before);
        port_holder_[simd] = step.index;
        if (inst.kind == Class::matrix) {
            const double length = inst.passes * constants_.matrix_pass;
            if (counting_) result_.matrix += length;
            const double done = now + length + constants_.matrix_to_matrix;
            const double sum = now + length + constants_.matrix_to_accumulator;
            wave.registers.result(inst, done, done, sum);
            return taken;
        }
        const double latency =
            inst.kind == Class::trans ? constants_.trans_latency : constants_.valu_latency;
        wave.registers.result(inst, now + latency, now + constants_.scalar_result_latency,
                              now + latency);
        return taken;
    }

    void fly(double asked, double fetched, double clocks) {
        Flight& flight = result_.flight;
        flight.asked += asked;
        flight.fetched += fetched;
        flight.asked_clocks += asked * clocks;
        flight.fetched_clocks += fetched * clocks;
    }

    double arrive(Wave& wave, const Description& inst, InFlight& queue, double at) {
        queue.add(at);
        wave.registers.result(inst, at, at, at);
        return constants_.salu_issue;
    }

    void mark_window(const Wave& wave) {
        if (wave.id != static_cast<int>(window_.wave)) return;
        if (wave.at == window_.begin) {
            counting_ = true;
            result_.begin = now_;
        }
        if (wave.at == window_.end && counting_) {
            counting_ = false;
            result_.end = now_;
        }
    }

    void release_barriers() {
        for (size_t group = 0; group < groups_.size(); ++group) {
            Group& it = groups_[group];
            if (!it.at_barrier || it.at_barrier < it.alive) continue;
            for (const auto& wave : waves_)
                if (wave->at_barrier && wave->stream.workgroup == group) {
                    wave->at_barrier = false;
                    wave->next = static_cast<double>(now_) + constants_.barrier_release;
                }
            it.at_barrier = 0;
        }
    }

    const std::vector<Description>& code_;
    const Window window_;
    const Constants& constants_;
    std::vector<std::unique_ptr<Wave>> waves_;
    std::array<std::vector<Wave*>, kSimds> of_simd_;
    std::array<int, kSimds> last_{-1, -1, -1, -1};
    std::array<uint32_t, kSimds> port_holder_{};  // instruction
    std::vector<VectorPorts> ports_;
    Lds lds_;
    VectorMemory memory_;
    Result result_;
    int64_t now_ = 0, issued_ = 0;  // issued_: when anything last did
    size_t alive_ = 0;
    std::vector<Group> groups_;
    bool counting_ = false;
};

std::string fault(const std::vector<Description>& code, std::span<const WaveSteps> waves,
                  const Window& window) {
    if (waves.empty() || waves.size() > kMostWaves)
        return "the model takes 1 to 32 waves, got " + std::to_string(waves.size());
    for (const WaveSteps& wave : waves) {
        if (wave.workgroup >= waves.size()) return "more workgroups than waves";
        size_t lines = 0;
        for (const Step& step : wave.steps) {
            if (step.index >= code.size()) return "a step of an instruction that is not there";
            lines += step.lines;
        }
        if (lines != wave.lines.size()) return "steps touch other lines than the stream has";
    }
    if (window.wave >= waves.size() || window.begin > window.end)
        return "the window is of no wave, or ends before it begins";
    return "";
}

}  // namespace

Result replay(const std::vector<Description>& code, std::span<const WaveSteps> waves,
              const Window& window, const Constants& constants) {
    const std::string wrong = fault(code, waves, window);
    if (!wrong.empty()) throw std::invalid_argument(wrong);
    return ComputeUnit(code, waves, window, constants).run();
}

}  // namespace emulator::timing
