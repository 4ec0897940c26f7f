#!/usr/bin/env bash
# The whole test suite, from a bare machine: ./scripts/test.sh [pytest arguments]
#
# OSCAR_NANO_MODEL may name a folder with the qwen3-nano test model; without it the tests that need
# it are skipped and say so. Test files run two at a time ($OSCAR_TEST_JOBS: 0 is one after another).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
ruff check .
ruff format --check .
mypy
exec python -m pytest -n "${OSCAR_TEST_JOBS:-2}" --dist loadfile --no-loadscope-reorder "$@"
