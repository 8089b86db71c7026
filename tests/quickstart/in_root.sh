#!/bin/bash
# Runs inside the clean root that run.sh makes: blocks of the page, and what the page says they print.
set -euo pipefail
cd /quickstart
block() { python3 lines.py quickstart.md "$1"; }
# What the page says that doctor ends with.
ends() { sed -n "s/^.doctor. ends with .\([0-9][^\`]*$1\)\`.*/\1/p" quickstart.md; }
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
# What a user has before: an environment, the wheel of its Python, and a build of PyTorch to choose.
tag=$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
page() { block "$1" | sed "s/-cp311-/-$tag-/"; }
if [ -n "$TORCH" ]; then
    python3 -m venv venv
    echo "$TORCH" >torch.txt
    export PIP_CONSTRAINT=$PWD/torch.txt
else
    python3 -m venv --system-site-packages venv # with Debian's PyTorch
fi
. venv/bin/activate
echo "$(python3 --version) in a clean $(. /etc/os-release && echo "$PRETTY_NAME"), $(ls dist)"
! command -v liteattention-rocm || fail "the root is not clean"

for part in "$@"; do
    start=$(date +%s)
    echo "== $part"
    case $part in
        install)
            page install >part.sh
            . ./part.sh
            ;;
        python)
            page python >part.py
            python part.py | tee part.log
            grep -Eq '^[4-8][0-9]% of the tiles skipped$' part.log || fail "another share"
            ;;
        doctor)
            page doctor >part.sh
            . ./part.sh 2>&1 | tee part.log | tail -1
            tail -1 part.log | grep -qxF "$(ends skipped)" || fail "not $(ends skipped): $(cat part.log)"
            ;;
        video)
            page video >part.sh
            . ./part.sh
            grep -q 'lite budget 0.05' out/report.md || fail "no row of LiteAttention: $(cat out/report.md)"
            ls out/lite_*.mp4 >/dev/null || fail "no video: $(ls out)"
            ;;
        emulate)
            page emulate | head -1 >part.sh
            . ./part.sh 2>&1 | tee part.log | tail -1
            tail -1 part.log | grep -qxF "$(ends MI300X)" || fail "not $(ends MI300X): $(cat part.log)"
            ;;
        vllm)
            page vllm-install >part.sh
            (deactivate; bash -eux part.sh)
            page vllm-serve >part.sh
            bash -eu part.sh >server.log 2>&1 &
            for _ in $(seq 240); do
                curl -sf localhost:8000/health && break
                kill -0 $! 2>/dev/null || fail "the server ended: $(tail -40 server.log)"
                sleep 1
            done
            page vllm-request >part.sh
            bash -eu part.sh | tee answer.json
            echo
            python3 -c 'import json; n = json.load(open("answer.json"))["usage"]["completion_tokens"]; assert n == 8, n' ||
                fail "$(tail -40 server.log)"
            grep -q 'liteattention_rocm attends on engine cpu' server.log || fail "another attention: $(cat server.log)"
            kill %1
            wait || true
            ;;
        *) fail "unknown part: $part" ;;
    esac
    echo "== $part: $(($(date +%s) - start)) s"
done
