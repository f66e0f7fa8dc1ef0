"""Taking the prefix K/V out of diffusers' own prefill."""

from __future__ import annotations

import torch
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21KVCache,
    QwenImage21KVLayerCache,
)

from ..prefix import PrefixBuffers


class PrefixSink(QwenImage21KVCache):
    """A K/V cache that puts what the prefill stores into persistent buffers."""

    class _Layer(QwenImage21KVLayerCache):
        def __init__(self, buffers: PrefixBuffers, layer: int) -> None:
            super().__init__()
            self._buffers = buffers
            self._layer = layer

        def store(self, k: torch.Tensor, v: torch.Tensor) -> None:
            self._buffers.store(self._layer, k, v)

    def __init__(self, buffers: PrefixBuffers) -> None:
        self.layer_caches = [self._Layer(buffers, layer) for layer in range(buffers.shape.layers)]
