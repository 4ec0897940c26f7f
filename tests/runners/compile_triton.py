"""Shared memory of the Triton kernels on a GPU that is not there.

    TRITON_INTERPRET=0 python -m tests.runners.compile_triton SM DIM CODEC

Compiles what a decode step, an extend over a cached prefix and a restored sink launch, runs none of
it, and prints {kernel: bytes} as JSON. A process of its own: in the tests' Triton is interpreted.
"""

import json
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from oscar_sglang.kernels.accumulate import accumulate
from oscar_sglang.kernels.begin import begin_rows
from oscar_sglang.kernels.materialise import materialise
from oscar_sglang.kernels.restore import restore_sinks
from oscar_sglang.kernels.rotate import join_prefix, rotate_queries
from oscar_sglang.kernels.store import store
from oscar_sglang.kernels.views import query_buffer
from tests.kernels.conftest import Lab, run_attention


class AbsentGpu:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, sm: int) -> None:
        self.target = GPUTarget("cuda", sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def main(sm: int, dim: int, codec_name: str) -> dict[str, int]:
    driver.set_active(AbsentGpu(sm))
    shared: dict[str, int] = {}
    launch = JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        kernel = launch(self, *args, warmup=True, **kwargs)
        name = self.fn.__name__
        shared[name] = max(shared.get(name, 0), kernel.metadata.shared)

    JITFunction.run = compile_only
    n = 40
    x = Lab(torch.device("cpu"), kv_heads=2, group=4, dim=dim, lens=(n,), codec_name=codec_name)
    q, k, v = x.qkv(n)
    view, where, one, zero = x.view(), x.batch([(0, 0, n)]), torch.tensor([1]), torch.tensor([0])
    store(view, where, q, k, v, query_buffer(view, n, q.shape[1]), triton_only=True)
    run_attention(x, [n])
    lse, r = torch.zeros(q.shape[:2]), view.params.r_k
    out = rotate_queries(q, r)
    join_prefix(out, lse, out, lse, r, torch.empty_like(out))
    prefix = torch.empty(2, n, *k.shape[1:], dtype=x.dtype)
    table = x.req_to_token
    materialise(view, table, one, zero, torch.tensor([0, n]), torch.tensor([30]), n, *prefix)
    accumulate(out.float(), lse, out, lse)
    begin_rows(x.seg.windows, one, torch.tensor([30]), one > 0, (zero.repeat(2), one.repeat(2)))
    restore_sinks(x.seg, table, one, torch.tensor([30]), one > 0, torch.zeros(3, dtype=torch.int64))
    return shared


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
