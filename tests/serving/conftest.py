"""Fixtures of the tests that run SGLang itself."""

from __future__ import annotations

from oscar_sglang.launch_server import enter_cpu_mode, has_gpu

if not has_gpu():
    enter_cpu_mode()  # before anything imports sglang
