"""``vllm serve`` answers through our attention, in processes of its own, to many clients at once.

Run in the environment that setup_vllm.sh makes: ``python -m pytest tests/serving/vllm_http.py``.
One server serves every test; its cache holds 2400 tokens, too few for what the tests ask for.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import memory, models
from tests.serving.vllm_harness import (
    BUILT_IN,
    OURS,
    STEP_ROWS,
    TOKENS,
    Server,
    engine,
    generate,
    made,
    prepare,
    serve,
)

prepare()

MODEL = "llama-d64"
PROMPTS = models.prompts(26, 500)
CONTEXT, BLOCK, BLOCKS = 1024, 16, 150
#: 64 requests that all start, and then want twice as many blocks as there are.
MANY = [[3 + i, *ids] for i, ids in enumerate(models.prompts(64, 24, seed=1))]
MANY_TOKENS = 64


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[list[int]]]:
    """What vLLM's own backend answers to PROMPTS and to MANY."""
    with engine(made(MODEL), BUILT_IN) as llm:
        return generate(llm, PROMPTS)[0], generate(llm, MANY, MANY_TOKENS)[0]


@pytest.fixture(scope="module")
def server(
    expected: tuple[list[list[int]], list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serve(
        made(MODEL),
        OURS,
        folder,
        max_model_len=CONTEXT,
        block_size=BLOCK,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=64,
    ) as running:
        yield running


def test_concurrent_clients_get_the_built_in_tokens(
    server: Server, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    before = _rows(server)
    assert server.tokens(PROMPTS, clients=8) == expected[0]
    assert max(map(len, PROMPTS)) > STEP_ROWS
    assert _rows(server) > before
    shared = server.metric("vllm:prefix_cache_hits_total")
    # one after the other, longest first, so that what is cached now has not been evicted yet
    longest = sorted(range(len(PROMPTS)), key=lambda i: -len(PROMPTS[i]))[:3]
    for i in [i for i in longest for _ in range(2)]:
        assert server.generate(PROMPTS[i]) == expected[0][i]
    assert server.metric("vllm:prefix_cache_hits_total") - shared > 1000
    server.idle()


def test_every_process_that_attends_runs_ours(server: Server) -> None:
    server.generate(PROMPTS[0])
    counts = server.calls
    layers = models.MODELS[MODEL].layers
    assert [c["layers"] for c in counts.values()] == [layers]
    (count,) = counts.values()
    assert next(iter(counts)) in {p.pid for p in server.process.children(recursive=True)}
    assert count["attention_calls"] == count["cache_writes"] == layers * count["steps"] > 0


def test_more_requests_than_the_cache_holds(
    server: Server, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    preempted = server.metric("vllm:num_preemptions_total")

    def serve_a_round() -> int:
        assert server.tokens(MANY, MANY_TOKENS, clients=64) == expected[1]
        server.idle()
        return server.memory()

    memory.settle(serve_a_round)
    for _ in range(5):  # where clients are slow, first ones leave before the last ones arrive
        if server.metric("vllm:num_preemptions_total") > preempted:
            break
        serve_a_round()
    assert server.metric("vllm:num_preemptions_total") > preempted


def test_clients_that_leave_free_what_they_held(
    server: Server, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    long = max(PROMPTS, key=len)
    for _ in range(4):
        body = {"model": "model", "prompt": long, "max_tokens": 400, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            lines = reply.iter_lines()
            assert any(line.startswith("data: ") for line in lines)
    server.idle()
    assert server.tokens(PROMPTS[:8], clients=4) == expected[0][:8]


def test_a_prompt_that_is_too_long_is_refused(
    server: Server, expected: tuple[list[list[int]], list[list[int]]]
) -> None:
    answer = server.post([5] * (CONTEXT + 1))
    assert answer.status_code == 400
    assert str(CONTEXT) in answer.text
    # one that fits the context and not the cache at once waits for nothing and is answered
    fits = server.post([5] * (CONTEXT - TOKENS))
    assert fits.status_code == 200 and len(fits.json()["choices"][0]["token_ids"]) == TOKENS
    server.idle()
    assert server.generate(PROMPTS[3]) == expected[0][3]


def test_the_log_names_backend_and_engine(server: Server) -> None:
    assert "liteattention_rocm attends on engine" in server.log
    assert "Cannot use" not in server.log  # what a platform says that takes another backend
    assert "Traceback" not in server.log


def _rows(server: Server) -> int:
    return sum(count["attention_rows"] for count in server.calls.values())
