#!/usr/bin/env bash
# From a bare machine to a 2-bit SGLang server and a short multi-turn chat.
#
#   ./scripts/demo.sh           set up, calibrate, serve, chat, stop
#   ./scripts/demo.sh --serve   the same, and leave the server running in the foreground
#
# Uses the GPU when there is one, the CPU otherwise. Re-running skips what is already there.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
model=.cache/smollm2-135m
python -m scripts.demo_model "$model"
exec python -m scripts.demo --model "$model" "$@"
