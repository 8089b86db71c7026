"""SGLang's own runtime serves through our attention: the same tokens as its built-in backend.

Run it in the environment that setup_sglang.sh makes. Tokens are greedy and in fp32, where the order
of sums does not reach them; bf16 is tried on a model whose answers are known. Every server that is
started serves as many tests as possible.
"""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sglang_cpu_platform import watch

from tests.serving import encoders, memory, models
from tests.serving.processes import stop
from tests.serving.sglang_server import BUILT_IN, OURS, Server, environment, greedy, serve

HERE = Path(__file__).parent
PROMPTS = models.prompts(12, 300)
#: 20 prompts that continue the last 4 of PROMPTS: after those, their prefixes are in the cache.
CONTINUED = [ids + [3 + n] * n for ids in PROMPTS[-4:] for n in (1, 2, 5, 17, 40)]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def model(folder: Path) -> Callable[[str], Path]:
    return lambda name: models.make(folder / "models", [name])[name]


@pytest.fixture(scope="session")
def built_in(folder: Path, model: Callable[[str], Path]) -> Callable[[str], list[list[int]]]:
    """What SGLang's own backend answers to PROMPTS, then to CONTINUED; one server per model."""

    @functools.cache
    def tokens(name: str) -> list[list[int]]:
        with serve(folder / f"built-in-{name}", model(name), BUILT_IN) as server:
            found = server.tokens(PROMPTS + CONTINUED, clients=8)
            assert not server.calls
        return found

    return tokens


@pytest.fixture(scope="module")
def pressed(folder: Path, model: Callable[[str], Path]) -> Iterator[Server]:
    """Everything at once: pages of 16, chunks of 64 tokens, mixed steps, room for 2048 tokens."""
    with serve(
        folder / "pressed",
        model("llama-d64"),
        OURS,
        max_total_tokens=2048,
        max_running_requests=32,
        schedule_conservativeness=0.1,  # admits what may not fit to its end
        page_size=16,
        chunked_prefill_size=64,
        enable_mixed_chunk=True,
    ) as server:
        yield server


class TestPressed:
    """One server under every kind of step."""

    MODEL = "llama-d64"

    @pytest.fixture
    def expected(self, built_in: Callable[[str], list[list[int]]]) -> list[list[int]]:
        return built_in(self.MODEL)

    def test_one_by_one(self, pressed: Server, expected: list[list[int]]) -> None:
        pressed.flush()
        before = pressed.count("prefix")
        assert pressed.tokens(PROMPTS) == expected[:12]
        # Prompts longer than a chunk came in pieces.
        assert pressed.count("prefix") > before

    def test_cached_prefixes(self, pressed: Server, expected: list[list[int]]) -> None:
        pressed.tokens(PROMPTS)
        answers = [pressed.generate(ids) for ids in PROMPTS + CONTINUED]
        assert [answer["output_ids"] for answer in answers] == expected
        hits = [answer["meta_info"]["cached_tokens"] for answer in answers]
        for ids, hit in zip(PROMPTS + CONTINUED, hits, strict=True):
            assert hit >= (len(ids) - 1) // 16 * 16 - 48  # CONTINUED adds up to 40 tokens

    def test_many_clients(self, pressed: Server, expected: list[list[int]]) -> None:
        pressed.flush()
        before = pressed.count("mixed")
        assert pressed.tokens(PROMPTS + CONTINUED, clients=8) == expected
        # Some steps held single rows beside the rows of a new prompt.
        assert pressed.count("mixed") > before

    def test_one_process_computes(self, pressed: Server) -> None:
        (process,) = pressed.calls
        assert process in [child.pid for child in pressed.process.children(recursive=True)]
        # Every layer of every step: three layers, and nobody else computes attention.
        assert pressed.count("calls") % models.MODELS[self.MODEL].layers == 0
        before = pressed.count("rows")
        pressed.flush()
        pressed.generate(PROMPTS[1], tokens=16)
        # The last token's keys are never needed.
        assert pressed.count("rows") - before == 3 * (len(PROMPTS[1]) + 15)

    @pytest.mark.parametrize("fault", watch.FAULTS[1:])
    def test_faults_are_seen(self, pressed: Server, expected: list[list[int]], fault: str) -> None:
        """The comparison is sharp: attention that is a little wrong gives other tokens."""
        with pressed.broken(fault):
            wrong = pressed.tokens(PROMPTS, clients=8)
        assert wrong != expected[:12]
        assert pressed.tokens(PROMPTS, clients=8) == expected[:12]

    def test_openai_api(self, pressed: Server, expected: list[list[int]]) -> None:
        text = " ".join(f"t{token}" for token in PROMPTS[3])
        answer = pressed.post(
            "/v1/completions", model="m", prompt=text, max_tokens=16, temperature=0, ignore_eos=True
        )
        assert answer.status_code == 200, answer.text
        words = re.findall(r"t(\d+)", answer.json()["choices"][0]["text"])
        assert [int(word) for word in words] == expected[3]

    def test_too_long_a_prompt(self, pressed: Server, expected: list[list[int]]) -> None:
        """Longer than the cache, and longer than the context: refused, and nothing else happens."""
        for length in (3000, models.CONTEXT + 1):
            ids = [3 + i % 500 for i in range(length)]
            answer = pressed.post("/generate", input_ids=ids, sampling_params=greedy(4))
            assert answer.status_code == 400, answer.text
            assert re.search(r"long|exceed", answer.text), answer.text
        assert pressed.generate(PROMPTS[0])["output_ids"] == expected[0]
        pressed.idle()

    def test_clients_that_leave(self, pressed: Server, expected: list[list[int]]) -> None:
        """Whoever hangs up stops costing anything, and nobody else notices."""
        pressed.flush()
        before = pressed.count("rows")

        def leave(ids: list[int]) -> None:
            body = {"input_ids": ids, "sampling_params": greedy(400), "stream": True}
            with pressed.client.stream("POST", "/generate", json=body) as answer:
                next(answer.iter_lines())

        with ThreadPoolExecutor(8) as pool:
            leaving = [pool.submit(leave, ids) for ids in PROMPTS[:6]]
            staying = pool.submit(pressed.tokens, PROMPTS)
            for each in leaving:
                each.result()
            assert staying.result() == expected[:12]
        pressed.idle()
        # They were not served to their end: that alone would be 3 layers of 6 * 400 rows.
        assert pressed.count("rows") - before < 3 * (6 * 200 + 2 * sum(map(len, PROMPTS)) + 12 * 16)

    def test_a_cache_too_small(self, pressed: Server, expected: list[list[int]]) -> None:
        """64 requests want 6000 tokens of cache, there are 2048: they wait, and are put back.

        Short prompts, so that 32 start in a few steps and together outgrow the cache; and requests
        that may end early, because SGLang keeps all the room that it knows to be needed.
        """
        draw = random.Random(5)
        prompts = [[draw.randrange(3, models.VOCAB) for _ in range(5)] for _ in range(64)]

        def ask(ids: list[int]) -> dict[str, Any]:
            return pressed.generate(ids, 90, ignore_eos=False)

        alone = [ask(ids)["output_ids"] for ids in prompts[:4]]
        pressed.flush()
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(ask, prompts))
        assert [answer["output_ids"] for answer in answers[:4]] == alone
        for answer in answers:
            assert len(answer["output_ids"]) == 90 or answer["output_ids"][-1] == models.END
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        pressed.idle()
        assert pressed.tokens(PROMPTS, clients=8) == expected[:12]

    def test_memory_is_stable(self, pressed: Server) -> None:
        draw = random.Random(6)

        def serve_a_round() -> int:
            ids = [[draw.randrange(3, models.VOCAB) for _ in range(100)] for _ in range(32)]
            pressed.tokens(ids, count=8, clients=16)
            pressed.idle()
            return pressed.memory()

        memory.settle(serve_a_round)


class TestServe:
    """``sglang serve``, pages of one token, no chunks."""

    @pytest.fixture(scope="class")
    def server(self, folder: Path, model: Callable[[str], Path]) -> Iterator[Server]:
        launcher = (str(Path(sys.executable).with_name("sglang")), "serve")
        with serve(folder / "serve", model("qwen3-d64"), OURS, launcher) as server:
            yield server

    def test_tokens(self, server: Server, built_in: Callable[[str], list[list[int]]]) -> None:
        expected = built_in("qwen3-d64")
        assert server.tokens(PROMPTS) == expected[:12]
        assert server.tokens(PROMPTS + CONTINUED, clients=8) == expected
        answer = server.generate(CONTINUED[-1])
        assert answer["meta_info"]["cached_tokens"] == len(CONTINUED[-1]) - 1
        assert server.count("prefix") > 0 and server.count("decode") > 0

    def test_the_log_says_who_attends(self, server: Server) -> None:
        assert server.log.count("graphs are off for decode") == 1
        assert server.log.count(f"{OURS!r}: 3 layers on engine 'cpu', pages of 1 tokens") == 1


def offline(
    folder: Path, model: Path, batches: list[list[list[int]]], tokens: int = 16, **options: object
) -> tuple[list[list[list[int]]], dict[str, int]]:
    """Run sglang_offline.py with our backend; return the new tokens and the counted calls."""
    folder.mkdir(parents=True)
    job = folder / "job.json"
    chosen = {
        "model_path": str(model), "attention_backend": OURS, "device": "cpu", "dtype": "float32",
        "max_total_tokens": 4096, "max_running_requests": 16, "random_seed": 0, **options,
    }  # fmt: skip
    job.write_text(json.dumps({"options": chosen, "batches": batches, "tokens": tokens}))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "sglang_offline.py"), str(job)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(**{watch.VARIABLE: str(folder)}),
            start_new_session=True,
        )
    try:
        code = process.wait(timeout=900)
    finally:
        stop(process)
    assert code == 0, (folder / "log").read_text(errors="replace")[-4000:]
    answers = json.loads(job.read_text())["answers"]
    (counts,) = watch.read(folder).values()
    return [[answer["output_ids"] for answer in batch] for batch in answers], counts


def test_offline_engine(
    folder: Path, model: Callable[[str], Path], built_in: Callable[[str], list[list[int]]]
) -> None:
    (first, second), counts = offline(
        folder / "offline",
        model("llama-d128"),
        [PROMPTS, PROMPTS + CONTINUED],
        page_size=1,
        chunked_prefill_size=64,
        enable_mixed_chunk=True,
    )
    expected = built_in("llama-d128")
    assert first == expected[:12]
    assert second == expected
    assert counts["calls"] and counts["decode"] and counts["prefix"]


def test_bf16(folder: Path, model: Callable[[str], Path]) -> None:
    """The model recites its lines: what follows a beginning of any length is known."""
    lines = models.recited()
    starts = [20 + 19 * i for i in range(len(lines))]
    prompts = [line[:start] for line, start in zip(lines, starts, strict=True)]
    (tokens,), _ = offline(
        folder / "bf16",
        model("overfit"),
        [prompts],
        tokens=64,
        dtype="bfloat16",
        page_size=16,
        chunked_prefill_size=64,
        enable_mixed_chunk=True,
    )
    assert tokens == [line[start : start + 64] for line, start in zip(lines, starts, strict=True)]


def test_embeddings(folder: Path) -> None:
    """An encoder's requests, some of them twice and with a prefix of their own, by 8 clients."""
    import torch

    model = encoders.make("bert", folder / "encoder")
    asked = encoders.requests()
    asked += [ids[: len(ids) // 2] for ids in asked[5:]] + asked[5:]
    expected = [encoders.embeddings(model, ids)[:1] for ids in asked]

    with serve(folder / "embeddings", folder / "encoder", OURS) as server:

        def embed(ids: list[int]) -> torch.Tensor:
            answer = server.post("/v1/embeddings", model="encoder", input=ids)
            assert answer.status_code == 200, answer.text
            return torch.tensor([answer.json()["data"][0]["embedding"]])

        def worst() -> float:
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(embed, asked))
            return max(map(encoders.deviation, found, expected))

        assert worst() < 1e-5
        assert server.count("rows") >= model.config.num_hidden_layers * sum(map(len, asked))
        for fault in ("scale x 1.02", "swapped GQA heads"):
            with server.broken(fault):
                assert worst() > 5e-4


def test_sliding_window(
    folder: Path, model: Callable[[str], Path], built_in: Callable[[str], list[list[int]]]
) -> None:
    """Windows of 48 keys under prompts of up to 340 tokens, in chunks that cross them."""
    (tokens,), _ = offline(
        folder / "window",
        model("mistral-window"),
        [PROMPTS + CONTINUED],
        page_size=16,
        chunked_prefill_size=64,
    )
    assert tokens == built_in("mistral-window")


def test_hybrid(
    folder: Path, model: Callable[[str], Path], built_in: Callable[[str], list[list[int]]]
) -> None:
    """Every second layer is a short convolution (LFM2): the others are ours, by their own numbers.

    The state of convolutions is bf16, whatever the model is.
    """
    (first, second), counts = offline(
        folder / "hybrid", model("lfm2"), [PROMPTS, PROMPTS + CONTINUED], chunked_prefill_size=64
    )
    expected = built_in("lfm2")
    assert first == expected[:12]
    assert second == expected
    assert counts["prefix"] and counts["decode"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        # Capped scores, and a window in every second layer. SGLang's Gemma 2 reads a name that
        # transformers 5 does not write any more.
        ("gemma2-d64", {"json_model_override_args": '{"hidden_act": "gelu_pytorch_tanh"}'}),
        ("gpt-oss", {}),
        ("gemma4", {"enable_multimodal": False}),
        ("exaone4", {}),
    ],
)
def test_models_that_the_built_in_backend_cannot_serve(
    folder: Path, model: Callable[[str], Path], name: str, options: dict[str, object]
) -> None:
    """It caps no scores and has no sinks, so the tokens are held against transformers'.

    SGLang has closed lists of backends for the last three, which the plugin must get us onto.
    """
    import torch
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        model(name), attn_implementation="eager", dtype=torch.float32
    )
    expected = []
    with torch.inference_mode():
        for ids in PROMPTS:
            made = reference.generate(
                torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False
            )
            expected.append(made[0, len(ids) :].tolist())
    (first, second), counts = offline(
        folder / name,
        model(name),
        [PROMPTS, PROMPTS],
        page_size=16,
        chunked_prefill_size=64,
        **options,
    )
    assert first == expected
    assert second == expected
    assert counts["prefix"] and counts["decode"]
