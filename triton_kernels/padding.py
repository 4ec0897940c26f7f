"""Heads of 80, 96 and 112 channels in rows of 128: zeros change no logit, their output is cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .layout import stored_head_dim


def padded(rows: torch.Tensor) -> torch.Tensor:
    """rows [..., D] -> [..., ``stored_head_dim(D)``]; the same tensor where that is D."""
    missing = stored_head_dim(rows.shape[-1]) - rows.shape[-1]
    return F.pad(rows, (0, missing)) if missing else rows
