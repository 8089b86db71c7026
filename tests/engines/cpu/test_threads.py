"""The threads that calls run on: on a machine with other work, in forked children, pinned."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

#: Two threads and an endless loop share one processor: whoever waits awake takes time from the one
#: that is waited for, as on a machine whose processors all have other work.
BUSY = """
    import json, os, subprocess, sys, time
    from pathlib import Path
    import torch
    from liteattention_rocm import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 256, 4, 64).bfloat16() for _ in range(3))

    def threads(ours):
        names = {int(x.name): (x / "comm").read_text() for x in Path("/proc/self/task").iterdir()}
        return [x for x, name in names.items() if ours == (name == "liteattention\\n")]

    torch.set_num_threads(1)
    expected = attention(q, k, v)
    begin = time.process_time()
    for _ in range(100):
        attention(q, k, v)
    alone = (time.process_time() - begin) / 100

    torch.set_num_threads(2)
    attention(q, k, v)  # the team is there
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    for thread in threads(ours=False):
        os.sched_setaffinity(thread, one)
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(loop.pid, one)
        time.sleep(0.1)
        begin = time.perf_counter()
        outs = [attention(q, k, v) for _ in range(200)]
        beside = (time.perf_counter() - begin) / 200
    finally:
        loop.kill()
        loop.wait()
    right = all([torch.equal(out, expected) for out in outs])
    print(json.dumps({
        "right": right,
        "alone": alone,
        "beside": beside,
        "allowed": sorted(allowed),
        "ours": [sorted(os.sched_getaffinity(thread)) for thread in threads(ours=True)],
    }))
"""


def test_a_busy_machine_costs_no_time_slices() -> None:
    """Waiting awake made each call take 4 ms or more, a time slice, in place of 0.2 ms."""
    found = run(BUSY)
    assert found["right"]
    # One of the processor's two programs has half of it, and the first call finds out.
    assert found["beside"] <= 20 * found["alone"], found
    # The caller is pinned. Our threads are not: they may run wherever the team might.
    assert found["ours"] and all(cpus == found["allowed"] for cpus in found["ours"]), found


FORKED = """
    import os, threading
    import torch
    from liteattention_rocm import attention, write_kv

    torch.manual_seed(0)
    torch.set_num_threads(4)
    calls = [tuple(torch.randn(1, n, 2, 32) for _ in range(3)) for n in (64, 300, 515)]
    expected = [attention(*call) for call in calls]
    rows = torch.randn(2, 8192, 4, 64)
    slots = torch.randperm(8192)
    print(threading.active_count(), flush=True)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    wrong = []

    def work(i):
        for _ in range(50):
            if not torch.equal(attention(*calls[i % 3]), expected[i % 3]):
                wrong.append(i)
            cache = torch.zeros(2, 512, 16, 4, 64)
            write_kv(*rows, *cache, slots)
            if not torch.equal(cache.flatten(1, 2)[:, slots], rows):
                wrong.append(-i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(len(wrong) > 0)
"""


def test_a_forked_child_calls_from_several_threads() -> None:
    """It has no threads but its own; calls share them, and whoever comes first does the work."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED)], timeout=120, capture_output=True
    )
    assert result.returncode == 0, result.stderr.decode()


def run(script: str) -> dict[str, object]:
    """What a script prints, as JSON, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        timeout=120, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(result.stdout)
