"""What we read of SGLang's objects, as types. Rows of ``hooks.READS`` hold them against SGLang."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class ModelConfig(Protocol):
    context_len: int
    head_dim: int
    num_attention_heads: int

    def get_num_kv_heads(self, tensor_parallel_size: int) -> int: ...


class Configurator(Protocol):
    """``KVCacheConfigurator``: sizes and builds a rank's pools."""

    attn_dp_size: int
    device: str
    layer_info: Any
    mambaish_config: Any
    model_config: ModelConfig
    model_dtype: torch.dtype
    server_args: Any


class ModelRunner(Protocol):
    attn_backend: Any
    device: str
    model: torch.nn.Module
    req_to_token_pool: Any
    server_args: Any
    token_to_kv_pool: Any


class ForwardBatch(Protocol):
    """Requests B, tokens of an extend T."""

    batch_size: int
    extend_num_tokens: int
    extend_prefix_lens: torch.Tensor  # [B]
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens: torch.Tensor  # [B]
    extend_seq_lens_cpu: list[int]
    forward_mode: Any
    input_ids: torch.Tensor  # [T]
    out_cache_loc: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    req_pool_indices: torch.Tensor  # [B]
    seq_lens: torch.Tensor  # [B]
