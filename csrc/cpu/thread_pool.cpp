#include "thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

namespace liteattention::cpu {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Longest that a thread of ours waits awake before it sleeps: the time between two regions of a
// short call, and about what sleeping and waking cost. More only burns time of other processes.
constexpr microseconds kSpin{20};
// A thread of OpenMP's that starts so long after its region did was not on a core: other work was.
// Awake it takes a few us, from sleep 50 to 200; a time slice of Linux is 3 to 4 ms. A first region
// also creates the threads, one after the other.
constexpr microseconds LateAfter(int threads) { return microseconds{1000 + 20 * threads}; }
// How long our own threads run after that, until OpenMP's are tried again. A try on a busy machine
// costs 10 to 40 ms, so the time doubles with each one that fails, up to kBusyMost.
constexpr std::chrono::seconds kBusy{1}, kBusyMost{8};

void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits awake until `ready`, at most kSpin. Returns whether it became ready.
template <class Ready>
bool Spin(const Ready& ready) {
    if (ready()) return true;
    const Clock::time_point end = Clock::now() + kSpin;
    do {
        for (int i = 0; i < 16; ++i) {
            Pause();
            if (ready()) return true;
        }
    } while (Clock::now() < end);
    return false;
}

// Threads of our own. Whoever asks first gets the next body of a region, and its caller asks as
// well. So on a busy machine a worker that comes late finds nothing to do and nobody waits for it:
// a worker without a core delays a call by the piece of work that it has begun, at most. Calls from
// several threads share the workers.
class Pool {
   public:
    void Run(int threads, const std::function<void(int)>& body) {
        Region region{&body, threads};
        int wake;
        bool all;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            AddWorkers(threads - 1);
            regions_.push_back(&region);
            untaken_.fetch_add(threads - 1, std::memory_order_release);
            wake = std::min(threads - 1, sleeping_);
            all = wake == sleeping_;
        }
        if (all && wake > 1)
            wake_.notify_all();
        else
            for (; wake > 0; --wake) wake_.notify_one();
        body(0);
        std::unique_lock<std::mutex> lock(mutex_);
        while (region.next < region.threads) {
            const int index = Take(region);
            lock.unlock();
            body(index);
            lock.lock();
        }
        const auto done = [&] { return region.running.load(std::memory_order_acquire) == 0; };
        lock.unlock();
        if (Spin(done)) return;
        lock.lock();
        region.caller_sleeps = true;
        done_.wait(lock, done);
    }

    // Processors that the workers may run on, from now on.
    void Allow(const cpu_set_t& cpus) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (allowed_ && CPU_EQUAL(&cpus, &cpus_)) return;
        cpus_ = cpus;
        ++allowed_;
    }

   private:
    // What a call runs. It lies on the caller's stack: a worker's last touch is of `running`.
    struct Region {
        const std::function<void(int)>* body;
        int threads;
        int next = 1;                 // the first body that nobody has taken
        std::atomic<int> running{0};  // bodies that workers have taken and not finished
        bool caller_sleeps = false;
    };

    void AddWorkers(int wanted) {
        try {
            for (; workers_ < wanted; ++workers_) std::thread([this] { Work(); }).detach();
        } catch (const std::system_error&) {
            // The process may have no more threads; the caller runs what no worker takes.
        }
    }

    int Take(Region& region) {
        untaken_.fetch_sub(1, std::memory_order_relaxed);
        const int index = region.next++;
        if (region.next == region.threads)
            regions_.erase(std::find(regions_.begin(), regions_.end(), &region));
        return index;
    }

    void Work() {
        pthread_setname_np(pthread_self(), "liteattention");
        int allowed = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            if (regions_.empty()) {
                lock.unlock();
                Spin([this] { return untaken_.load(std::memory_order_acquire) > 0; });
                lock.lock();
                ++sleeping_;
                wake_.wait(lock, [this] { return !regions_.empty(); });
                --sleeping_;
            }
            Region& region = *regions_.front();
            region.running.fetch_add(1, std::memory_order_relaxed);
            const int index = Take(region);
            if (allowed != allowed_) {
                allowed = allowed_;
                sched_setaffinity(0, sizeof cpus_, &cpus_);
            }
            lock.unlock();
            (*region.body)(index);
            lock.lock();
            const bool notify = region.caller_sleeps;
            if (region.running.fetch_sub(1, std::memory_order_release) == 1 && notify)
                done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    std::vector<Region*> regions_;  // with bodies that nobody has taken
    std::atomic<int> untaken_{0};   // the number of those bodies
    int workers_ = 0;
    int sleeping_ = 0;
    cpu_set_t cpus_{};
    int allowed_ = 0;  // counts the changes of cpus_
};

// The process's OpenMP run-time, if one is loaded (PyTorch brings one), by the entry points that
// GNU's and LLVM's share. On a machine that has time for them its threads are the best: they ran
// the layer before, on the same cores, and are still spinning, so that they start within a few us.
// A second pool would compete with them: its workers need the cores on which they spin.
class OpenMp {
   public:
    OpenMp() {
        const auto find = [](auto** to, const char* name) {
            *to =
                reinterpret_cast<std::remove_reference_t<decltype(*to)>>(dlsym(RTLD_DEFAULT, name));
        };
        find(&parallel_, "GOMP_parallel");
        find(&thread_, "omp_get_thread_num");
        find(&team_, "omp_get_num_threads");
        find(&inside_, "omp_in_parallel");
    }
    bool found() const { return parallel_ && thread_ && team_ && inside_; }
    // Whether the caller is itself in a parallel region, where a team is one thread by default.
    bool inside() const { return inside_(); }

    // Returns whether all threads came in time. Adds the processors that they may run on to
    // `cpus`, if it is given.
    bool Run(int threads, const std::function<void(int)>& body, Clock::time_point start,
             cpu_set_t* cpus) const {
        struct Call {
            const OpenMp* self;
            const std::function<void(int)>* body;
            int threads;
            Clock::time_point start;
            cpu_set_t* cpus;
            std::mutex mutex{};
            std::atomic<bool> late{false};
        } call{this, &body, threads, start, cpus};
        const auto work = [](void* data) {
            Call& c = *static_cast<Call*>(data);
            if (Clock::now() - c.start > LateAfter(c.threads))
                c.late.store(true, std::memory_order_relaxed);
            if (c.cpus) {
                cpu_set_t own;
                CPU_ZERO(&own);
                sched_getaffinity(0, sizeof own, &own);
                std::lock_guard<std::mutex> lock(c.mutex);
                CPU_OR(c.cpus, c.cpus, &own);
            }
            // The team may be smaller than asked for, e.g. inside another parallel region.
            const int team = c.self->team_();
            for (int i = c.self->thread_(); i < c.threads; i += team) (*c.body)(i);
        };
        parallel_(work, &call, static_cast<unsigned>(threads), 0);
        return !call.late.load(std::memory_order_relaxed);
    }

   private:
    void (*parallel_)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*thread_)() = nullptr;
    int (*team_)() = nullptr;
    int (*inside_)() = nullptr;
};

// Never destroyed: workers may outlive static destruction.
Pool* g_pool = nullptr;
std::once_flag g_once;

// A forked child inherits an OpenMP run-time without its threads, which may wait for them forever.
bool g_forked = false;

// A forked child has no workers, so it drops the parent's pool (whose locks may be held) and starts
// its own. Registered when the library is loaded: a parent may fork before it uses this pool, while
// PyTorch has long used OpenMP.
[[maybe_unused]] const int g_registered = pthread_atfork(nullptr, nullptr, [] {
    if (g_pool) g_pool = new Pool;
    g_forked = true;
});

Pool& Instance() {
    std::call_once(g_once, [] { g_pool = new Pool; });
    return *g_pool;
}

// Until when the machine counts as busy and how long it will, if it is found busy again; when
// processors are to be looked at again.
std::atomic<Clock::time_point> g_busy{Clock::time_point::min()};
std::atomic<std::chrono::seconds> g_busy_next{kBusy};
std::atomic<Clock::time_point> g_look{Clock::time_point::min()};

}  // namespace

void ParallelRun(int threads, const std::function<void(int)>& body) {
    if (threads <= 1) {
        body(0);
        return;
    }
    Pool& own = Instance();
    static const OpenMp open_mp;
    if (!open_mp.found() || g_forked) {
        own.Run(threads, body);
        return;
    }
    const Clock::time_point start = Clock::now();
    if (start < g_busy.load(std::memory_order_relaxed) && !open_mp.inside()) {
        own.Run(threads, body);
        return;
    }
    // A framework may have pinned each of its threads, the caller among them: ours may run where
    // any of them may.
    const bool look = start >= g_look.load(std::memory_order_relaxed);
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    const std::chrono::seconds busy = g_busy_next.load(std::memory_order_relaxed);
    if (!open_mp.Run(threads, body, start, look ? &cpus : nullptr)) {
        g_busy.store(Clock::now() + busy, std::memory_order_relaxed);
        g_busy_next.store(std::min(2 * busy, kBusyMost), std::memory_order_relaxed);
    } else if (busy != kBusy) {
        g_busy_next.store(kBusy, std::memory_order_relaxed);
    }
    if (look) {
        if (CPU_COUNT(&cpus) > 0) own.Allow(cpus);
        g_look.store(start + kBusy, std::memory_order_relaxed);
    }
}

}  // namespace liteattention::cpu
