"""Ask a running SGLang server for videos, with other settings of LiteAttention in each request.

    sglang serve --model-path Wan-AI/Wan2.1-T2V-1.3B-Diffusers \\
        --attention-backend liteattention_rocm \\
        --attention-backend-config '{"budget": 0.05, "warmup_steps": 4}'
    python examples/sglang_video.py --prompt "a cat walks through snow"

Needs nothing but Python. The server logs how much each request skipped, and by which engine.
"""

import argparse
import json
import time
import urllib.error
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://localhost:30000")
parser.add_argument("--prompt", default="a cat walks through snow")
parser.add_argument("--more", type=json.loads, default={}, help="further fields of a request, JSON")
options = parser.parse_args()

# None: what the server was started with. False: dense. Fields override single ones of the server's.
SETTINGS = {
    "the server's settings": None,
    "dense": False,
    "a bolder budget": {"budget": 0.1},
    "a threshold instead": {"threshold": -6},
}


def call(path: str, body: dict | None = None) -> dict:
    """Answer of the server; a wrong setting is an HTTP error whose body has every reason."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(options.url + path, data)
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        parser.error(f"no server answers at {options.url}: {error.reason}")


jobs = {}
for name, setting in SETTINGS.items():  # all at once: each has its own skip lists
    body = {"prompt": options.prompt, "seed": 0, **options.more}
    if setting is not None:
        body["diffusers_kwargs"] = {"liteattention": setting}
    jobs[name] = call("/v1/videos", body)["id"]
for name, job in jobs.items():
    while (answer := call(f"/v1/videos/{job}"))["status"] not in ("completed", "failed"):
        time.sleep(0.5)
    print(f"{name}: {answer['status']}, {answer.get('file_path') or answer.get('error')}")
