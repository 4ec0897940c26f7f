"""Calibration statistics from SGLang itself: every checkpoint it can load, no second loader.

SGLang's ModelRunner runs in this process, with a 16-bit (or 32-bit) cache and without the
scheduler. Its attention backend is wrapped: each layer's q, k, v and output of a prefill go to the
accumulator on the way. Under tensor parallelism each rank is a process that sees its own heads;
what they gathered is put side by side.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..artifact.fingerprint import attention_layers, read_config, text_config
from ..kernels.codec import LayerCodec
from ..kernels.codec_position import Rope
from ..kernels.padding import padded
from ..launch_server import enter_cpu_mode
from .collect import Progress
from .errors import CalibrationError
from .rope import PROBE_TOKENS, checked, turning
from .sglang_runner import bare_runner, resolved_arguments
from .stats import Accumulator, BeforeRope, Moments, join_heads
from .widths import Prober, Scores, probe_ids, projection


class KeysOfOneToken:
    """Stands for an accumulator during the forward that shows how keys turn."""

    def add(self, layer: int, q, k, v, o) -> None:
        if layer == 0:
            self.keys = k.float()


class StatisticsBackend:
    """An attention backend that also shows whole prefills to ``accumulator``.

    ``layer_ids``: of the layers that have K and V, in a hybrid model not all.
    """

    def __init__(self, inner: Any, accumulator: Accumulator, layer_ids: list[int]) -> None:
        self._inner = inner
        self._accumulator = accumulator
        self._index = {layer_id: i for i, layer_id in enumerate(layer_ids)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, q=None, k=None, v=None, layer=None, forward_batch=None, *args, **kwargs):
        """By position or, as SGLang's linear-attention layers call it, by keyword."""
        out = self._inner.forward(q, k, v, layer, forward_batch, *args, **kwargs)
        if layer.layer_id in self._index:
            d, index = layer.qk_head_dim, self._index[layer.layer_id]
            stream = forward_batch.residual_stream
            if isinstance(self._accumulator, Prober) and stream is not None:
                self._accumulator.residual[index] = stream.residual
            rows = (padded(x.reshape(len(q), -1, d)) for x in (q, k, v, out))
            self._accumulator.add(index, *rows)
        return out


def collect_in_sglang(
    model_dir: Path | str,
    sequences: Sequence[torch.Tensor],
    n_sink: int = 64,
    device: str = "cpu",
    progress: Progress | None = None,
    tp: int = 1,
    fit: Callable[[list[Moments]], Sequence[LayerCodec]] | None = None,
    **flags: Any,
) -> tuple[list[Moments], list[str], Scores | None]:
    """``collect`` inside SGLang: moments per layer, the names of the model's parameters, and with
    ``fit`` the scores of its codecs' slots (``widths``; None if they cannot be had).

    ``tp`` ranks share the model, each a process with a device of its own (on a CPU, a share of the
    cores); KV heads must be a multiple. ``flags`` are SGLang's server arguments in Python spelling,
    e.g. ``quantization="fp8"``.
    """
    sequences = list(sequences)
    if tp == 1:
        return _collect(0, Path(model_dir), sequences, n_sink, device, progress, fit, flags)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        flags = {"tp_size": tp, "nccl_port": s.getsockname()[1]} | flags
    with tempfile.TemporaryDirectory() as folder:
        work = (Path(model_dir), sequences, n_sink, device, fit, flags, Path(folder))
        torch.multiprocessing.start_processes(_rank, work, nprocs=tp, start_method="spawn")
        ranks = [torch.load(Path(folder) / f"{i}.pt", weights_only=True) for i in range(tp)]
    layers = zip(*(moments for moments, *_ in ranks), strict=True)
    joined = [join_heads([_unpacked(fields) for fields in layer]) for layer in layers]
    if progress:
        tokens = sum(map(len, sequences))
        progress("running SGLang", tokens, tokens)
    return joined, *ranks[0][1:]


def _rank(rank: int, model_dir, sequences, n_sink, device, fit, flags, folder: Path) -> None:
    if device == "cpu":  # SGLang wants to know each rank's cores
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // flags["tp_size"])
        groups = [cores[i * share : (i + 1) * share] or cores for i in range(flags["tp_size"])]
        binding = "|".join(f"{g[0]}-{g[-1]}" for g in groups)
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
    found = _collect(rank, model_dir, sequences, n_sink, device, None, fit, flags)
    torch.save(([_packed(m) for m in found[0]], *found[1:]), folder / f"{rank}.pt")


def _packed(moments: Moments) -> dict[str, Any]:
    """Nothing but tensors and numbers."""
    before = vars(moments.before)
    return vars(moments) | {"before": before | {"rope": dataclasses.asdict(before["rope"])}}


def _unpacked(fields: dict[str, Any]) -> Moments:
    before = fields["before"]
    return Moments(**fields | {"before": BeforeRope(**before | {"rope": Rope(**before["rope"])})})


@torch.no_grad()
def _collect(rank, model_dir, sequences, n_sink, device, progress, fit, flags):
    """Moments of this rank's heads, all ranks' scores."""
    tokens = sum(map(len, sequences))
    runner = _load(model_dir, device, rank, max(map(len, sequences)), flags)
    text = text_config(read_config(model_dir))
    layer_ids = attention_layers(text, runner.model_config.num_hidden_layers)
    keys = KeysOfOneToken()
    inner = runner.attn_backend
    runner.attn_backend = StatisticsBackend(inner, keys, layer_ids)
    try:
        ids = sequences[0][:1].repeat(min(PROBE_TOKENS, max(map(len, sequences))))
        runner.forward(prefill_batch(runner, ids.to(runner.device)))
        turns = turning(text, runner.model_config.head_dim, layer_ids)
        if layer_ids[0] == 0:
            turns = checked(turns, padded(keys.keys))
        accumulator = Accumulator(n_sink, turning=turns)
        runner.attn_backend = StatisticsBackend(inner, accumulator, layer_ids)
        done = 0
        for ids in sequences:
            runner.forward(prefill_batch(runner, ids.to(runner.device)))
            accumulator.advance(len(ids))
            done += len(ids)
            if progress:
                progress("running SGLang", done, tokens)
        names = [name for name, _ in runner.model.named_parameters()]
        moments, scores, ids = accumulator.finish(len(layer_ids)), None, None
        if fit is not None:
            ids = probe_ids(sequences, n_sink)
        if ids is not None:
            prober = _prober(runner.model, layer_ids, fit(moments), n_sink)
            if prober is not None:
                runner.attn_backend = StatisticsBackend(inner, prober, layer_ids)
                runner.forward(prefill_batch(runner, ids.to(runner.device)))
                scores = prober.scores()
        return moments, names, scores
    finally:
        del runner
        gc.collect()


def _prober(
    model: torch.nn.Module, layer_ids: list[int], codecs: Sequence[LayerCodec], n_sink: int
) -> Prober | None:
    """None if the decoder layers or their output projections are not found.

    Most of SGLang's models keep the residual stream in the batch, where the backend finds it; from
    the others hooks on the decoder layers take it. A projection of several ranks is the sum of what
    each makes of its heads, whoever adds it up.
    """
    from sglang.srt.runtime_context import get_parallel

    blocks = getattr(getattr(model, "model", model), "layers", None)
    found = {
        child.layer_id: (projection(module), child.scaling)
        for module in model.modules()
        for child in module.children()
        if hasattr(child, "layer_id") and hasattr(child, "scaling") and projection(module)
    }
    if blocks is None or not set(layer_ids) <= set(found):
        return None

    def projected(linear, x: torch.Tensor) -> torch.Tensor:
        out = linear(x)
        out = out[0] if isinstance(out, tuple) else out
        if get_parallel().attn_tp_size > 1 and not getattr(linear, "reduce_results", True):
            out = get_parallel().attn_tp_group.all_reduce(out)
        return out

    project = [functools.partial(projected, found[i][0]) for i in layer_ids]
    prober = Prober(codecs, project, [found[i][1] for i in layer_ids], n_sink)

    def before(index: int, module, args, kwargs) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        hidden, residual = given["hidden_states"], given.get("residual")
        if given["forward_batch"].residual_stream is None:
            prober.residual[index] = hidden if residual is None else hidden + residual

    for index, layer_id in enumerate(layer_ids):
        hook = functools.partial(before, index)
        blocks[layer_id].register_forward_pre_hook(hook, with_kwargs=True)
    return prober


def _load(model_dir: Path, device: str, rank: int, longest: int, flags: dict[str, Any]):
    """SGLang's ModelRunner of one rank, room for one sequence."""
    if device == "cpu":
        enter_cpu_mode()
        flags = {"dtype": "float32", "attention_backend": "torch_native"} | flags
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    args = resolved_arguments(
        model_path=str(model_dir),
        device=device.partition(":")[0],
        disable_cuda_graph=True,
        disable_radix_cache=True,  # nothing is asked twice; a hybrid model would keep states for it
        max_total_tokens=longest + 64,
        max_running_requests=1,
        chunked_prefill_size=max(longest, 512),
        mem_fraction_static=0.8,
        **flags,
    )
    kv_heads, ranks = model_config_of(args).get_total_num_kv_heads(), resolving_view(args).tp_size
    if kv_heads % ranks:
        raise CalibrationError(
            f"{ranks} ranks cannot share {kv_heads} KV heads evenly; use fewer (--tp)"
        )
    return bare_runner(args, rank)


def prefill_batch(runner, ids: torch.Tensor, row: int = 1, first_slot: int = 1):
    """A batch of one fresh request on a free row, in the slots from ``first_slot`` on.

    It asks for hidden states, which no CUDA graph of SGLang's gives: the model runs step by step.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    n, device = len(ids), ids.device
    slots = torch.arange(first_slot, first_slot + n, device=device)
    requests = runner.req_to_token_pool
    requests.req_to_token[row, :n] = slots.int()
    if hasattr(requests, "mamba_pool"):  # a hybrid model's states, as its scheduler hands them out
        requests.req_index_to_mamba_index_mapping[row] = row
        requests.mamba_pool.clear_slots(torch.tensor([row], device=device))
    lengths = torch.tensor([n], device=device)
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.tensor([row], device=device),
        seq_lens=lengths,
        seq_lens_cpu=lengths.cpu(),
        seq_lens_sum=n,
        out_cache_loc=slots,
        positions=torch.arange(n, device=device),
        mrope_positions=torch.arange(n, device=device).expand(3, n).contiguous(),  # of text
        spec_algorithm=SpeculativeAlgorithm.NONE,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        extend_num_tokens=n,
        extend_seq_lens=lengths,
        extend_seq_lens_cpu=[n],
        extend_prefix_lens=torch.zeros_like(lengths),
        extend_prefix_lens_cpu=[0],
        extend_start_loc=torch.zeros_like(lengths),
        extend_logprob_start_lens_cpu=[n],
    )
