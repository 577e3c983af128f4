#!/bin/sh
# Makes .venv and installs this project with everything it needs. Safe to run again: nothing to do takes seconds.
#   OSD_PYTHON  which python (default python3)      OSD_EXTRA  cpu | gpu (default: gpu where nvidia-smi answers)
#   OSD_VENV    where the environment goes (default .venv)
set -eu
cd "$(dirname "$0")/.."
VENV=${OSD_VENV:-.venv}
PY=${OSD_PYTHON:-python3}
EXTRA=${OSD_EXTRA:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}

fail() { echo "setup: $1" >&2; exit 2; }
command -v "$PY" >/dev/null 2>&1 || fail "$PY not found: install Python 3.11, 3.12 or 3.13, or set OSD_PYTHON"
"$PY" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' ||
  fail "$PY is $("$PY" -V 2>&1): Python 3.11, 3.12 or 3.13 is needed; set OSD_PYTHON to one"
case $EXTRA in cpu | gpu) ;; *) fail "OSD_EXTRA=$EXTRA: must be cpu or gpu" ;; esac

# Nothing changed since the last complete run: nothing to do.
STAMP="$VENV/.osd-setup"
WANT=$(cat pyproject.toml constraints/"$EXTRA".txt constraints/cpu-excludes.txt scripts/setup.sh | cksum)" $EXTRA $(pwd)"
if [ -x "$VENV/bin/osd" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$WANT" ]; then exit 0; fi

if [ ! -x "$VENV/bin/python" ]; then
  "$PY" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "Python's venv module is missing: apt-get install python3-venv (or your system's equivalent)"
  echo "setup: creating $VENV"
  "$PY" -m venv "$VENV"
fi
# Before 0.9.8 uv knows no --excludes.
if uv pip install --help 2>/dev/null | grep -q -e --excludes; then UV=uv; else
  "$VENV/bin/python" -m pip install -q 'uv>=0.9.8'
  UV=$VENV/bin/uv
fi
# uv does not read pip's settings: hand it the wheel folder pip was told about.
if [ -z "${UV_FIND_LINKS:-}" ]; then
  UV_FIND_LINKS=${PIP_FIND_LINKS:-$("$VENV/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
  if [ -n "$UV_FIND_LINKS" ]; then export UV_FIND_LINKS; else unset UV_FIND_LINKS; fi
fi
set -- --python "$VENV/bin/python" -c "constraints/$EXTRA.txt" -e ".[$EXTRA,dev]"
if [ "$EXTRA" = cpu ]; then
  set -- --excludes constraints/cpu-excludes.txt "$@"
  # A CPU build of torch on disk wins, if it is for this Python; otherwise uv takes PyTorch's own CPU builds.
  TAG=$("$VENV/bin/python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  if ! ls "${UV_FIND_LINKS:-/nonexistent}"/torch-*+cpu-"$TAG"-*.whl >/dev/null 2>&1 && [ -z "${UV_TORCH_BACKEND:-}" ]; then
    UV_TORCH_BACKEND=cpu
    export UV_TORCH_BACKEND
  fi
fi
echo "setup: installing the $EXTRA environment into $VENV"
# Bytecode now, once: where Python may not write it (PYTHONDONTWRITEBYTECODE, a read-only disk) each process would
# compile vLLM and torch again, which doubles the start of an engine.
"$UV" pip install -q --compile-bytecode "$@"
echo "$WANT" >"$STAMP"
