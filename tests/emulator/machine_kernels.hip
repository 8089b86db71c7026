// Kernels for tests of the machine: what a wave starts with, memory spaces, calls, barriers.
#define KERNEL extern "C" __attribute__((global))
#define SHARED __attribute__((shared))
#define DEVICE __attribute__((device))
#define THREADS(n) __attribute__((amdgpu_flat_work_group_size(1, n)))

typedef unsigned int u32;
typedef unsigned long long u64;

DEVICE inline u32 global_thread() {
    u32 group = (__builtin_amdgcn_workgroup_id_z() * __builtin_amdgcn_grid_size_y() /
                     __builtin_amdgcn_workgroup_size_y() +
                 __builtin_amdgcn_workgroup_id_y()) *
                    (__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()) +
                __builtin_amdgcn_workgroup_id_x();
    u32 sx = __builtin_amdgcn_workgroup_size_x(), sy = __builtin_amdgcn_workgroup_size_y(),
        sz = __builtin_amdgcn_workgroup_size_z();
    u32 item = (__builtin_amdgcn_workitem_id_z() * sy + __builtin_amdgcn_workitem_id_y()) * sx +
               __builtin_amdgcn_workitem_id_x();
    return group * sx * sy * sz + item;
}

// 8 words per thread: workgroup, work-item, sizes.
KERNEL THREADS(1024) void identify(u32* out) {
    u32* mine = out + 8 * global_thread();
    mine[0] = __builtin_amdgcn_workgroup_id_x() | __builtin_amdgcn_workgroup_id_y() << 8 |
              __builtin_amdgcn_workgroup_id_z() << 16;
    mine[1] = __builtin_amdgcn_workitem_id_x() | __builtin_amdgcn_workitem_id_y() << 8 |
              __builtin_amdgcn_workitem_id_z() << 16;
    mine[2] = __builtin_amdgcn_workgroup_size_x();
    mine[3] = __builtin_amdgcn_workgroup_size_y();
    mine[4] = __builtin_amdgcn_workgroup_size_z();
    mine[5] = __builtin_amdgcn_grid_size_x();
    mine[6] = __builtin_amdgcn_grid_size_z();
    mine[7] = __builtin_popcountll(__builtin_amdgcn_read_exec());
}

DEVICE const u32 kPrimes[16] = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53};
DEVICE u32 first_word[2] = {100, 200}, second_word[2] = {300, 400};
DEVICE u32* const kPointers[2] = {first_word, second_word};

// A table of constants, and pointers that the loader relocates.
KERNEL THREADS(64) void tables(u32* out, const u32* index) {
    u32 i = __builtin_amdgcn_workitem_id_x();
    out[i] = kPrimes[index[i] & 15] + kPointers[index[i] >> 4 & 1][index[i] >> 5 & 1];
}

DEVICE __attribute__((noinline)) u32 collatz(u32 n) {
    u32 steps = 0;
    while (n != 1) n = n % 2 ? 3 * n + 1 : n / 2, ++steps;
    return steps;
}

// A call, divergent loops, and an array in private memory.
KERNEL THREADS(256) void calls(u32* out, const u32* order) {
    u32 i = __builtin_amdgcn_workitem_id_x();
    volatile u32 stack[8];
    for (u32 k = 0; k < 8; ++k) stack[(order[k] + i) & 7] = collatz(i + k + 1);
    u32 sum = 0;
    for (u32 k = 0; k < 8; ++k) sum = sum * 31 + stack[k];
    out[i] = sum;
}

extern SHARED u32 dynamic_words[];

// Reverses blocks through LDS, static and dynamic, some rounds with a barrier each.
KERNEL THREADS(512) void reverse(u32* data, u32 rounds) {
    SHARED u32 fixed[512];
    u32 n = __builtin_amdgcn_workgroup_size_x(), i = __builtin_amdgcn_workitem_id_x();
    u32 value = data[__builtin_amdgcn_workgroup_id_x() * n + i];
    for (u32 round = 0; round < rounds; ++round) {
        fixed[i] = value;
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
        dynamic_words[i] = fixed[n - 1 - i] + round;
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        __builtin_amdgcn_s_barrier();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
        value = dynamic_words[(i + 1) % n];
    }
    data[__builtin_amdgcn_workgroup_id_x() * n + i] = value;
}

// The first wave leaves at once; the others still meet at the barrier.
KERNEL THREADS(256) void leave_early(u32* out) {
    SHARED u32 box[256];
    u32 i = __builtin_amdgcn_workitem_id_x();
    if (__builtin_amdgcn_readfirstlane(i) < 64) return;
    box[i] = i;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    out[i] = box[64 + (i + 64) % 192];
}

// The waves write different values to one word: `last` depends on the order, `same` does not.
KERNEL THREADS(512) void racy(u32* last) {
    SHARED u32 box[64];
    u32 i = __builtin_amdgcn_workitem_id_x();
    box[i % 64] = i / 64;
    __builtin_amdgcn_s_waitcnt(0xc07f);
    last[i] = box[(i + 1) % 64];
}

KERNEL THREADS(512) void same(u32* out) {
    SHARED u32 box[64];
    u32 i = __builtin_amdgcn_workitem_id_x();
    box[i % 64] = i % 64 + 7;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    out[i] = box[(i + 1) % 64];
}

// Wave 0 waits at the barrier for wave 1, which loops for as long as flag is 0.
KERNEL THREADS(128) void wait_for(const u32* flag, u32* out) {
    u32 i = __builtin_amdgcn_workitem_id_x();
    if (__builtin_amdgcn_readfirstlane(i) >= 64)
        while (__atomic_load_n(flag, __ATOMIC_RELAXED) == 0) __builtin_amdgcn_s_sleep(1);
    __builtin_amdgcn_s_barrier();
    out[i] = 1;
}

// A wave spins on LDS until the other one, of the other half, has stored there.
KERNEL THREADS(128) void hand_over(u32* out, u32 giver) {
    SHARED u32 box;
    u32 i = __builtin_amdgcn_workitem_id_x(), wave = __builtin_amdgcn_readfirstlane(i) / 64;
    if (i == 0) box = 0;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    if (wave == giver) __atomic_fetch_add(&box, 1, __ATOMIC_RELAXED);
    else while (__atomic_fetch_add(&box, 0, __ATOMIC_RELAXED) == 0) __builtin_amdgcn_s_sleep(1);
    out[i] = wave;
}

KERNEL THREADS(64) void halve(float* data) {
    u32 i = __builtin_amdgcn_workitem_id_x();
    data[i] = data[i] * 0.5f;
}

// An instruction that is not emulated, and where it cannot be reached.
KERNEL THREADS(64) void not_emulated(u32* out) {
    __asm__ volatile("s_rfe_b64 s[0:1]");
    out[0] = 1;
}

KERNEL THREADS(64) void all_emulated(u32* out) {
    out[__builtin_amdgcn_workitem_id_x()] = 1;
}
