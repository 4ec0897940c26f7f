"""What a running request's segments hold, in a file: for a server that answers oddly.

With $OSCAR_SGLANG_DUMP=DIR every ``GET /server_info`` writes one .npz a running request into DIR,
between two batches; the server waits meanwhile.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..events import log_event
from ..kernels.codec import rotate
from ..kernels.reference import Segments, history_end, materialise
from ..pool.hybrid import attention_pool

logger = logging.getLogger(__name__)

DUMP_VARIABLE = "OSCAR_SGLANG_DUMP"
SEGMENTS = ("sink", "history", "recent")


def dump_request(
    path: Path,
    seg: Segments,
    req_to_token: torch.Tensor,
    row: int,
    length: int,
    *,
    layers: Sequence[int] = (0,),
    **extra: Any,
) -> None:
    """Write the first ``length`` tokens of request row ``row`` as its next token would read them.

    slots    [n] int64   of SGLang's allocator
    segment  [n] uint8   index into ``SEGMENTS``
    k, v     [L, n, Hk, D] float32, of ``layers``, decoded and in the model's basis (K after RoPE)
    row, length, n_sink, n_recent, recent_start, hist_end, layers, and ``extra`` as given
    """
    windows, device = seg.windows.windows, seg.history.blocks[0].device
    recent_start = seg.windows.recent_start[row : row + 1]
    read = torch.tensor([length], device=device)
    end = int(history_end(read, recent_start, windows, seg.spec.block))
    position = torch.arange(length)
    segment = (position >= windows.n_sink).int() + (position >= max(end, windows.n_sink)).int()
    slots = req_to_token[row, :length].long()
    shape = (2, length, *seg.windows.sink_k[0].shape[2:])
    rows = torch.empty(shape, device=device)
    keys, values = [], []
    for layer in layers:
        materialise(seg, layer, row, slots, 0, end, *rows)
        params = seg.params[layer]
        keys.append(rotate(rows[0], params.k_back).cpu().numpy())
        values.append(rotate(rows[1], params.r_v.mT).cpu().numpy())
    np.savez(
        path,
        slots=slots.cpu().numpy(),
        segment=segment.numpy().astype(np.uint8),
        k=np.stack(keys),
        v=np.stack(values),
        row=row,
        length=length,
        n_sink=windows.n_sink,
        n_recent=windows.n_recent,
        recent_start=int(recent_start),
        hist_end=end,
        layers=np.array(layers),
        **extra,
    )


def dump_running(scheduler: Any, folder: Path) -> list[str]:
    """One file for every request that owns a row in ``scheduler``; their names.

    Names are our own: a request's id is whatever its client sent.
    """
    pool = attention_pool(scheduler.token_to_kv_pool_allocator.get_kvcache())
    table = scheduler.req_to_token_pool.req_to_token
    if table.is_cuda:
        torch.cuda.synchronize()  # SGLang forwards on a stream of its own
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    batches = (scheduler.running_batch, scheduler.last_batch)
    running = {r.kv.req_pool_idx: r for b in batches if b is not None for r in b.reqs}
    for row, request in running.items():
        if row is None or not (length := request.kv.kv_committed_len):
            continue
        name = f"{os.getpid()}-row{row}-{length}.npz"
        tokens = np.array([*request.origin_input_ids, *request.output_ids][:length])
        dump_request(
            folder / name, pool.segments, table, int(row), length, tokens=tokens, rid=request.rid
        )
        log_event(logger, "dump", file=folder / name, rid=request.rid, row=row, tokens=length)
        names.append(name)
    return names


def after_server_info(scheduler: Any) -> list[str]:
    """Names of the files written, if $OSCAR_SGLANG_DUMP asks for them; a failure is only logged."""
    folder = os.environ.get(DUMP_VARIABLE)
    if not folder:
        return []
    try:
        return dump_running(scheduler, Path(folder).expanduser())
    except OSError as error:
        logger.warning("oscar: cannot dump into $%s: %s", DUMP_VARIABLE, error)
        return []
