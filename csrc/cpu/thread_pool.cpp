#include "thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <type_traits>

namespace liteattention::cpu {
namespace {

class Pool {
   public:
    void Run(int threads, const std::function<void(int)>& body) {
        std::lock_guard<std::mutex> turn(turn_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (workers_ < threads - 1) {
                const int index = ++workers_;
                std::thread([this, index, seen = round_] { Work(index, seen); }).detach();
            }
            body_ = &body;
            active_ = threads - 1;
            pending_ = threads - 1;
            ++round_;
        }
        wake_.notify_all();
        body(0);
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return pending_ == 0; });
        body_ = nullptr;
    }

   private:
    void Work(int index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (index > active_) continue;
            const std::function<void(int)>* body = body_;
            lock.unlock();
            (*body)(index);
            lock.lock();
            if (--pending_ == 0) done_.notify_one();
        }
    }

    std::mutex turn_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    const std::function<void(int)>* body_ = nullptr;
    uint64_t round_ = 0;
    int workers_ = 0;
    int active_ = 0;
    int pending_ = 0;
};

// The process's OpenMP run-time, if one is loaded (PyTorch brings one), by the entry points that
// GNU's and LLVM's share. Its threads are the ones that ran the layer before: on the same cores,
// pinned as the framework wants them, and still spinning, so that they start within a few us and do
// not compete with a second pool.
struct OpenMp {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*thread)() = nullptr;
    int (*team)() = nullptr;

    OpenMp() {
        const auto find = [](auto** to, const char* name) {
            *to =
                reinterpret_cast<std::remove_reference_t<decltype(*to)>>(dlsym(RTLD_DEFAULT, name));
        };
        find(&parallel, "GOMP_parallel");
        find(&thread, "omp_get_thread_num");
        find(&team, "omp_get_num_threads");
    }
    bool found() const { return parallel && thread && team; }

    void Run(int threads, const std::function<void(int)>& body) const {
        struct Call {
            const OpenMp* self;
            const std::function<void(int)>* body;
            int threads;
        } call{this, &body, threads};
        const auto work = [](void* data) {
            const Call& c = *static_cast<Call*>(data);
            // The team may be smaller than asked for, e.g. inside another parallel region.
            const int team = c.self->team();
            for (int i = c.self->thread(); i < c.threads; i += team) (*c.body)(i);
        };
        parallel(work, &call, static_cast<unsigned>(threads), 0);
    }
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

}  // namespace

void ParallelRun(int threads, const std::function<void(int)>& body) {
    if (threads <= 1) {
        body(0);
        return;
    }
    Pool& own = Instance();
    static const OpenMp open_mp;
    if (open_mp.found() && !g_forked)
        open_mp.Run(threads, body);
    else
        own.Run(threads, body);
}

}  // namespace liteattention::cpu
