#!/bin/bash
# The lines of docs/quickstart.md in a clean Debian that has no checkout, no compiler and no package of
# this machine. Needs root (it mounts and changes roots) and debootstrap.
#
#   tests/quickstart/run.sh SUITE PART...
#
#   SUITE   bookworm (Python 3.11); bookworm-X.Y (Python X.Y, copied from this machine: no Debian suite
#           has 3.10 or 3.12); trixie (3.13, PyTorch 2.6 from Debian unless TORCH is set)
#   PART    install, python, doctor, video, emulate or vllm: see in_root.sh
#   WHEEL   the wheel; by default the one of dist that fits (`make wheels`)
#   TORCH   which PyTorch `pip install torch` of the page takes
#
# The clean Debian is kept in build/quickstart; a copy of it runs the lines. The root gets what the page
# takes from a checkout, the wheel, and this machine's access to the network: resolv.conf, certificates,
# variables of pip, and the folder that PIP_FIND_LINKS names.
set -euo pipefail
suite=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
[ "$(id -u)" = 0 ] || { echo "missing: root (sudo make test-quickstart)" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "missing: debootstrap (apt-get install debootstrap)" >&2; exit 1; }
prefix=
case $suite in
    bookworm) tag=cp311 packages=() ;;
    bookworm-3.*)
        tag=cp${suite#*-} tag=${tag/./} packages=()
        python=$(PYTHONPATH=$repository/tools python3 -m liteattention_tools.wheels --find "${suite#*-}")
        prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
        [ "$prefix" != /usr ] || { echo "$python is not a folder of its own (as pyenv's are)" >&2; exit 1; }
        ;;
    trixie) tag=cp313 packages=(python3-torch) TORCH=${TORCH-} ;;
    *) echo "unknown suite: $suite" >&2; exit 1 ;;
esac
wheel=${WHEEL:-$(find "$repository/dist" -name "*-$tag-*.whl" 2>/dev/null)}
[ -e "$wheel" ] || { echo "missing: a wheel of $tag in dist (make wheels)" >&2; exit 1; }

work=$repository/build/quickstart
base=$work/${suite%-*}-base root=$work/$suite
mkdir -p "$work"
network() {
    cp -L /etc/resolv.conf "$1/etc/resolv.conf"
    cp -L /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"
}
if [ ! -e "$base/ready" ]; then
    rm -rf "$base"
    # curl: the requests. g++ and libnuma1: for vLLM, as the page says; nothing of this package is built.
    debootstrap --variant=minbase --include=python3-venv,ca-certificates,curl,g++,libnuma1 "${suite%-*}" "$base" >"$base.log"
    network "$base"
    if [ ${#packages[@]} -gt 0 ]; then
        chroot "$base" apt-get install -y -qq --no-install-recommends "${packages[@]}" >>"$base.log"
    fi
    chroot "$base" apt-get clean
    touch "$base/ready"
fi
rm -rf "$root"
cp -a --reflink=auto "$base" "$root"
network "$root"
if [ -n "$prefix" ]; then # the interpreter, where it was compiled for, without what was installed into it
    mkdir -p "$root$prefix"
    cp -a "$prefix/." "$root$prefix"
    rm -rf "$root$prefix"/lib/python3.*/site-packages/*
fi
mkdir -p "$root/quickstart/dist" "$root/quickstart/e2e/model" "$root/quickstart/tests"
cp "$wheel" "$root/quickstart/dist/"
cp -r "$repository/docker" "$root/quickstart/"
cp -r "$repository/e2e/model/wan-shapes" "$root/quickstart/e2e/model/"
cp -r "$repository/tests/serving" "$root/quickstart/tests/"
cp "$repository/docs/quickstart.md" "$here/lines.py" "$here/in_root.sh" "$root/quickstart/"
if [ -d "${PIP_FIND_LINKS:-}" ]; then mkdir -p "$root$PIP_FIND_LINKS"; fi

# Its own mounts and processes: all of them end with it.
export root suite prefix TORCH="${TORCH-torch==2.13.0}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-}"
unshare --mount --pid --fork --kill-child bash -euc '
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    if [ -d "${PIP_FIND_LINKS:-}" ]; then mount --bind -o ro "$PIP_FIND_LINKS" "$root$PIP_FIND_LINKS"; fi
    exec chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH="${prefix:+$prefix/bin:}/usr/local/bin:/usr/bin:/bin" TORCH="$TORCH" \
        $(env | grep "^PIP_[A-Z_]*=[^ ]*$" || true) PIP_QUIET=1 bash /quickstart/in_root.sh "$@"' sh "$@"
rm -rf "$root"
