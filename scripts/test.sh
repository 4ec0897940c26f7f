#!/usr/bin/env bash
# The whole test suite, from a bare machine: ./scripts/test.sh [pytest arguments]
#
# OSCAR_NANO_MODEL may name a folder with the qwen3-nano test model; without it the tests that need
# it are skipped and say so.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
ruff check .
ruff format --check .
exec python -m pytest "$@"
