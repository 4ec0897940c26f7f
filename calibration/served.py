"""Methods whose arithmetic is ``oscar_sglang.kernels``: what is judged is what is served."""

from __future__ import annotations

import torch

from ..kernels import codec_omni
from ..kernels.codec import (
    CODECS,
    LayerCodec,
    Rows,
    decode_k,
    decode_v,
    encode_k,
    encode_v,
    rotate,
)
from ..kernels.hadamard import hadamard
from .fit import CONTEXT, N_SINK, fit_layer
from .method import Encoded, Method, block_pieces
from .model_fit import Fitter, wanted_bits, widen
from .stats import Moments


def _positions(x: torch.Tensor, first: int) -> torch.Tensor:
    return torch.arange(first, first + len(x), device=x.device)


class Served(Method):
    """A codec of ``CODECS``: parameters are those of an artifact (``Artifact.codecs``)."""

    def __init__(self, codec: str, summary: str | None = None, fitted: str | None = None) -> None:
        self.spec = CODECS[fitted or codec]
        super().__init__(codec, summary or self.spec.summary)

    def fit(self, moments: Moments) -> LayerCodec:
        return fit_layer(moments, self.spec.name).codec

    def fit_model(self, moments, scores=None, context=0) -> list[LayerCodec]:
        """Of ``position`` with the widths that its default bits pay for."""
        if self.spec.meta != "position":
            return super().fit_model(moments)
        context = context or CONTEXT
        fits = Fitter(self.spec.name, context, N_SINK).fit(moments)
        bits = wanted_bits(None, moments[0].k_mean.shape[-1])
        wide, _ = widen(fits, moments, scores, bits, context, N_SINK)
        return [fit.codec for fit in wide]

    def encode(self, params, k, v, first=0) -> Encoded:
        spec, params = params
        k_rows = encode_k(spec, params, rotate(k, params.r_k), _positions(k, first))
        v_rows = encode_v(spec, params, rotate(v, params.r_v))
        return Encoded(tuple(k_rows), tuple(v_rows), first)

    def decode(self, params, encoded):
        spec, params = params
        k_rows, v_rows = Rows(*encoded.k), Rows(*encoded.v)
        k_rot = decode_k(spec, params, k_rows, _positions(k_rows.packed, encoded.first))
        v_rot = decode_v(spec, params, v_rows)
        return rotate(k_rot, params.k_back), rotate(v_rot, params.r_v.mT)


class OscarProxy(Served):
    """``oscar`` with the V statistic of the published code: V^T diag(w) V, w_t = k_t M k_t^T."""

    def __init__(self) -> None:
        super().__init__("oscar-proxy", "OSCAR with the V statistic of its published code", "oscar")

    def fit(self, moments: Moments) -> LayerCodec:
        return fit_layer(moments, "oscar", proxy=True).codec


class Omni(Method):
    """OScaR: Hadamard, token norms, keys per channel over blocks. Data-free.

    norm, rotation  what ``codec_omni.OPTIONS`` call so; the ablation of its paper leaves them out
    """

    block = codec_omni.BLOCK
    needs_stats = False

    def __init__(
        self, name: str, summary: str, norm: str = "head", rotation: str = "hadamard"
    ) -> None:
        super().__init__(name, summary)
        self.options = {"norm": norm, "rotation": rotation}

    def fit(self, moments: Moments | None) -> None:
        return None

    def encode(self, params, k, v, first=0) -> Encoded:
        k_rot, v_rot = rotate(k, self._basis(k)), rotate(v, self._basis(v))
        norm = self.options["norm"] == "head"
        pieces = block_pieces(first, len(k), self.block)
        blocks = (codec_omni.encode_k(k_rot[p], token_norm=norm) for p in pieces)
        return Encoded(tuple(t for b in blocks for t in b), tuple(codec_omni.encode_v(v_rot)))

    def decode(self, params, encoded):
        blocks = zip(*(encoded.k[i::3] for i in range(3)), strict=True)
        k_rot = torch.cat([codec_omni.decode_k(codec_omni.KeyBlock(*b)) for b in blocks])
        v_rot = codec_omni.decode_v(Rows(*encoded.v))
        return rotate(k_rot, self._basis(k_rot)), rotate(v_rot, self._basis(v_rot))

    def _basis(self, x: torch.Tensor) -> torch.Tensor:
        """H, or the identity, for every head of x [T, Hk, D]; its own inverse."""
        _, heads, d = x.shape
        r = hadamard(d).float() if self.options["rotation"] == "hadamard" else torch.eye(d)
        return r.to(x.device).expand(heads, d, d)
