"""Methods whose arithmetic is ``oscar_sglang.kernels``: what is judged is what is served."""

from __future__ import annotations

import torch

from ..artifact.file import neutral_params
from ..kernels.codec import LayerCodec, Rows, rotate, spec_of
from .fit import CONTEXT, N_SINK, fit_layer
from .method import Encoded, Method, block_pieces
from .model_fit import Fitter, wanted_bits, widen
from .stats import Moments


class Served(Method):
    """A codec of ``CODECS``: parameters are those of an artifact (``Artifact.codecs``).

    name     of the method, where it is not the codec's
    options  of an artifact of it (``Metadata.choices``)
    """

    def __init__(
        self, codec: str, name: str | None = None, summary: str | None = None, **options: str
    ) -> None:
        self.spec = spec_of(codec, options)
        super().__init__(name or codec, summary or self.spec.summary)
        self.options = self.spec.meta.chosen(options)
        self.block, self.needs_stats = self.spec.block, self.spec.needs_data
        self.family, self.mixed = self.spec.family, self.spec.meta.mixed

    def fit(self, moments: Moments | None) -> LayerCodec | None:
        return fit_layer(moments, self.spec.name).codec if self.needs_stats else None

    def fit_model(self, moments, scores=None, context=0) -> list[LayerCodec | None]:
        """Of a codec of mixed widths with those that its default bits pay for."""
        if not self.mixed:
            return super().fit_model(moments)
        context = context or CONTEXT
        fits = Fitter(self.spec.name, context, N_SINK).fit(moments)
        bits = wanted_bits(None, moments[0].k_mean.shape[-1])
        wide, _ = widen(fits, moments, scores, bits, context, N_SINK)
        return [fit.codec for fit in wide]

    def _codec(self, params: LayerCodec | None, heads: int, head_dim: int, device) -> LayerCodec:
        """``params``, or those of a codec without data."""
        if params is not None:
            return params
        neutral = neutral_params(self.spec, heads, head_dim, self.options)
        return LayerCodec(self.spec, neutral.to(device))

    def encode(self, params, k, v, first=0) -> Encoded:
        spec, params = self._codec(params, *k.shape[1:], k.device)
        k_rot, v_rot = rotate(k, params.r_k), rotate(v, params.r_v)
        if spec.block == 1:
            at = torch.arange(first, first + len(k), device=k.device)
            rows = spec.encode_k(params, k_rot, at), spec.encode_v(params, v_rot)
            return Encoded(*map(tuple, rows), first)
        pieces = block_pieces(first, len(k), spec.block)
        blocks = [spec.meta.encode_block(k_rot[i], v_rot[i], 0) for i in pieces]
        keys = (t for k_rows, _, channels in blocks for t in (*k_rows, channels))
        values = (torch.cat(parts) for parts in zip(*(v for _, v, _ in blocks), strict=True))
        return Encoded(tuple(keys), tuple(values), first)

    def decode(self, params, encoded):
        _, heads, size = encoded.k[0].shape
        head_dim = size * 8 // self.spec.k_bits
        spec, params = self._codec(params, heads, head_dim, encoded.k[0].device)
        v_rot = spec.decode_v(params, Rows(*encoded.v))
        if spec.block == 1:
            rows = Rows(*encoded.k)
            at = encoded.first + torch.arange(len(rows.packed), device=v_rot.device)
            k_rot = spec.decode_k(params, rows, at)
        else:
            blocks = zip(*(encoded.k[i::3] for i in range(3)), strict=True)
            pieces = (
                spec.decode_k(params, Rows(packed, meta), channels=channels)
                for packed, meta, channels in blocks
            )
            k_rot = torch.cat(list(pieces))
        return rotate(k_rot, params.k_back), rotate(v_rot, params.r_v.mT)


class OscarProxy(Served):
    """``oscar`` with the V statistic of the published code: V^T diag(w) V, w_t = k_t M k_t^T."""

    def __init__(self) -> None:
        super().__init__("oscar", "oscar-proxy", "OSCAR with the V statistic of its published code")

    def fit(self, moments: Moments) -> LayerCodec:
        return fit_layer(moments, "oscar", proxy=True).codec
