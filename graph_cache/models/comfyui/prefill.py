"""Taking the prefix K/V out of the model's own prefill."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ...prefix import PrefixBuffers


class PrefixTap:
    """While entered, copies what the blocks' attention makes of the prefix into buffers.

    Each block is called with the function that its attention is to use. The tap puts one around it
    that copies K and V (after RoPE) and calls it; so the prefill stays the model's own, whichever
    attention it uses. It never raises: the model may be in the middle of recording its memory.

    Parameters
    ----------
    blocks
        The model's transformer blocks.
    buffers
        To be filled.
    """

    def __init__(self, blocks: list[nn.Module], buffers: PrefixBuffers) -> None:
        self._blocks = list(blocks)
        self._buffers = buffers
        self._handles: list = []
        self._stored: set[int] = set()
        self._problem = ""
        names = list(inspect.signature(type(self._blocks[0]).forward).parameters)[1:]
        self._places = {name: names.index(name) for name in ("attn_fn", "prefix_len")}

    def __enter__(self) -> PrefixTap:
        for layer, block in enumerate(self._blocks):
            self._handles.append(
                block.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            )
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def problem(self) -> str:
        """What kept the buffers from being filled; empty if nothing did."""
        missing = len(self._blocks) - len(self._stored)
        return self._problem or (f"{missing} blocks without prefix K/V" if missing else "")

    def _hook(self, layer: int) -> Callable[..., tuple[tuple, dict]]:
        def hook(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if self._read("prefix_len", args, kwargs) != self._buffers.shape.prefix:
                # The target alone, over what the model has cached itself.
                return args, kwargs
            tapped = self._tap(layer, self._read("attn_fn", args, kwargs))
            if "attn_fn" in kwargs:
                return args, {**kwargs, "attn_fn": tapped}
            place = self._places["attn_fn"]
            return (*args[:place], tapped, *args[place + 1 :]), kwargs

        return hook

    def _read(self, name: str, args: tuple, kwargs: dict) -> Any:
        return kwargs[name] if name in kwargs else args[self._places[name]]

    def _tap(self, layer: int, attend: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(query, key, value, *args, **kwargs):
            prefix = self._buffers.shape.prefix
            try:
                self._buffers.store(layer, key[:, :prefix], value[:, :prefix])
                self._stored.add(layer)
            except ValueError as error:
                self._problem = self._problem or str(error)
            return attend(query, key, value, *args, **kwargs)

        return tapped
