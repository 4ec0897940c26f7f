"""SGLang's ModelRunner in this process, without its scheduler: for calibration, and for tests."""

from __future__ import annotations

from typing import Any

from ..config import fold_options


def resolved_arguments(**flags: Any) -> Any:
    """SGLang's ServerArgs, resolved, from its fields and our ``oscar_*`` options."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    args = ServerArgs(**fold_options(flags))
    args.resolve_once()
    return args


def bare_runner(server_args: Any, rank: int = 0) -> Any:
    """The ModelRunner of one rank, with its pools; tokens in, logits out, no tokenizer."""
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs

    world_rank = spawn_world_rank(server_args, tp_rank=rank, pp_rank=0)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=rank))
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *_args, **_kwargs: None
    loaded, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), rank, rank)
    return loaded.torch_runner
