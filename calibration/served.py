"""Methods whose arithmetic is ``oscar_sglang.kernels``: what is judged is what is served."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels import codec as base
from ..kernels import codec_accurate, codec_compact, codec_lloyd, codec_omni
from ..kernels.codec import CODECS, LayerParams, Rows, rotate
from .fit import DAMPING, fit_layer
from .fit_options import feedback_metric, fit_grids
from .hadamard import hadamard
from .method import Encoded, Method, block_pieces
from .stats import Moments


class Served(Method):
    """``feedback``, ``aligned``, ``oscar``: parameters are those of an artifact."""

    def __init__(self, codec: str, summary: str | None = None, fitted: str | None = None) -> None:
        self.spec = CODECS[fitted or codec]
        super().__init__(codec, summary or self.spec.summary)

    def fit(self, moments: Moments) -> LayerParams:
        return fit_layer(moments, self.spec.name).params

    def encode(self, params, k, v, first=0) -> Encoded:
        k_rows = base.encode_k(self.spec, params, rotate(k, params.r_k))
        v_rows = base.encode_v(self.spec, rotate(v, params.r_v))
        return Encoded(tuple(k_rows), tuple(v_rows))

    def decode(self, params, encoded):
        k_rot, v_rot = base.decode_rows(Rows(*encoded.k)), base.decode_rows(Rows(*encoded.v))
        return rotate(k_rot, params.r_k.mT), rotate(v_rot, params.r_v.mT)


class OscarProxy(Served):
    """``oscar`` with the V statistic of the published code: V^T diag(w) V, w_t = k_t M k_t^T."""

    def __init__(self) -> None:
        super().__init__("oscar-proxy", "OSCAR with the V statistic of its published code", "oscar")

    def fit(self, moments: Moments) -> LayerParams:
        return fit_layer(moments, "oscar", proxy=True).params


class FeedbackParams(NamedTuple):
    """What the options of ``feedback`` add to a layer.

    metric          [Hk, D, D] float32, rotated by r_k (``accurate``)
    k_grid, v_grid  metadata grids (``compact``)
    """

    base: LayerParams
    metric: torch.Tensor
    k_grid: codec_compact.MetaGrid
    v_grid: codec_compact.MetaGrid


class FeedbackOptions(Method):
    """``feedback`` with ``accurate`` codes and/or ``compact`` metadata."""

    def __init__(self, accurate: bool, compact: bool) -> None:
        self.spec = CODECS["feedback"]
        self.accurate, self.compact = accurate, compact
        words = ["accurate"] * accurate + ["compact"] * compact
        summary = "feedback; " + " and ".join(
            {"accurate": "more search per written key", "compact": "8-bit metadata"}[w]
            for w in words
        )
        super().__init__("-".join(["feedback", *words]), summary)

    def fit(self, moments: Moments) -> FeedbackParams:
        params = fit_layer(moments, "feedback").params
        metric = feedback_metric(params.r_k, moments.qtq, DAMPING).float()
        return FeedbackParams(params, metric, *fit_grids(self.spec, params, moments))

    def encode(self, params, k, v, first=0) -> Encoded:
        k_rot, v_rot = rotate(k, params.base.r_k), rotate(v, params.base.r_v)
        if self.accurate:
            codes, k_meta = codec_accurate.encode(
                k_rot, params.base.factor, params.metric, lambda m: self._store(m, params.k_grid)
            )
        else:
            k_meta = self._store(base.value_range(k_rot, self.spec.k_range), params.k_grid)
            codes = base.feedback_codes(k_rot, k_meta, params.base.factor)
        v_meta = self._store(base.value_range(v_rot, self.spec.v_range), params.v_grid)
        v_codes = base.round_codes(v_rot, v_meta)
        return Encoded(
            (base.pack(codes), self._bytes(k_meta, params.k_grid)),
            (base.pack(v_codes), self._bytes(v_meta, params.v_grid)),
        )

    def decode(self, params, encoded):
        hats = []
        for (packed, stored), grid, r in (
            (encoded.k, params.k_grid, params.base.r_k),
            (encoded.v, params.v_grid, params.base.r_v),
        ):
            meta = codec_compact.decode_meta(stored, grid) if self.compact else stored
            hats.append(rotate(base.decode(base.unpack(packed), meta), r.mT))
        return tuple(hats)

    def _store(self, meta: torch.Tensor, grid: codec_compact.MetaGrid) -> torch.Tensor:
        """(step, lo) rounded to what can be stored, float32."""
        if self.compact:
            return codec_compact.decode_meta(codec_compact.encode_meta(meta, grid), grid)
        return _half(meta).float()

    def _bytes(self, meta: torch.Tensor, grid: codec_compact.MetaGrid) -> torch.Tensor:
        return codec_compact.encode_meta(meta, grid) if self.compact else _half(meta)


def _half(meta: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float16).max
    return meta.clamp(-limit, limit).half()


class Lloyd(Method):
    """OSCAR's rotations with a Gaussian codebook and one scale a row."""

    def __init__(self) -> None:
        super().__init__("lloyd", "OSCAR's rotations, Lloyd-Max codebook, no zero-point")

    def fit(self, moments: Moments) -> LayerParams:
        return fit_layer(moments, "oscar").params

    def encode(self, params, k, v, first=0) -> Encoded:
        rows = (codec_lloyd.encode(rotate(x, r)) for x, r in ((k, params.r_k), (v, params.r_v)))
        return Encoded(*(tuple(r) for r in rows))

    def decode(self, params, encoded):
        pairs = ((encoded.k, params.r_k), (encoded.v, params.r_v))
        return tuple(rotate(codec_lloyd.decode(Rows(*rows)), r.mT) for rows, r in pairs)


class Omni(Method):
    """OScaR: Hadamard, token norms, keys per channel over blocks. Data-free."""

    block = codec_omni.BLOCK
    needs_stats = False

    def __init__(self) -> None:
        super().__init__("omni", "OScaR: keys per channel over 128 tokens after a token norm")

    def fit(self, moments: Moments | None) -> None:
        return None

    def encode(self, params, k, v, first=0) -> Encoded:
        k_rot, v_rot = rotate(k, _plain(k)), rotate(v, _plain(v))
        blocks = (codec_omni.encode_k(k_rot[p]) for p in block_pieces(first, len(k), self.block))
        return Encoded(tuple(t for b in blocks for t in b), tuple(codec_omni.encode_v(v_rot)))

    def decode(self, params, encoded):
        blocks = zip(*(encoded.k[i::3] for i in range(3)), strict=True)
        k_rot = torch.cat([codec_omni.decode_k(codec_omni.KeyBlock(*b)) for b in blocks])
        v_rot = base.decode_rows(Rows(*encoded.v))
        return rotate(k_rot, _plain(k_rot)), rotate(v_rot, _plain(v_rot))


def _plain(x: torch.Tensor) -> torch.Tensor:
    """H for every head of x [T, Hk, D]; its own inverse."""
    _, heads, d = x.shape
    return hadamard(d).float().to(x.device).expand(heads, d, d)
