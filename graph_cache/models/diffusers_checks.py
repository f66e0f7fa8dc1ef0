"""What about a diffusers model, or one call of it, stands against the cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.transformers import transformer_qwenimage21 as qwen
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21AttnProcessor,
    QwenImage21FlexAttnProcessor,
    QwenImage21KVCache,
    QwenImage21KVLayerCache,
    QwenImage21Transformer2DModel,
)

from ..eligibility import module_fallbacks, tensor_fallbacks
from ..reasons import Fallback
from .base import ModelCall, Phase

HOOK_NAME = "qwen_image_graph_cache"
"""Name of our hook in diffusers' registry."""

_KNOWN_PROCESSORS = (QwenImage21AttnProcessor, QwenImage21FlexAttnProcessor)
# Without "_native_flash": it takes no mask, so the model cannot prefill with it.
_TESTED_BACKENDS = ("native", "_native_cudnn", "_native_efficient", "_native_math")

# Code that our step does again. Taken at import, so that a patch of it later is seen.
_KNOWN_CODE: dict[type, Callable[..., Any]] = {
    **{processor: processor.__call__ for processor in _KNOWN_PROCESSORS},
    **{
        known: known.forward
        for known in (
            QwenImage21Transformer2DModel,
            qwen.QwenImage21TransformerBlock,
            qwen.QwenImage21Attention,
            qwen.QwenImage21AdaLayerNormContinuous,
        )
    },
}

# What the decode body touches. A model without exactly these children is not one we know.
_MODEL_CHILDREN = {
    *("pos_embed", "time_text_embed", "txt_in", "img_in", "modulation"),
    *("transformer_blocks", "norm_out", "proj_out"),
}
_BLOCK_CHILDREN = {"img_norm1", "attn", "img_norm2", "img_mlp"}
_ATTENTION_CHILDREN = {"to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k"}
_FORWARD_ARGUMENTS = {
    *("hidden_states", "encoder_hidden_states", "timestep", "img_shapes", "img_mask"),
    *("encoder_hidden_states_mask", "attention_kwargs", "kv_cache", "kv_cache_mode", "return_dict"),
}


def model_fallbacks(
    model: QwenImage21Transformer2DModel,
    native: Callable[..., Any],
    device: torch.device | None,
) -> Iterator[Fallback]:
    """What holds until the next prefill.

    Parameters
    ----------
    model
        The transformer.
    native
        What runs below our hook; the class's own forward unless somebody has replaced it.
    device
        Where the run's inputs are; None if there is no run yet.
    """
    yield from _parallel_fallbacks(model)
    yield from module_fallbacks(model, HOOK_NAME)
    structure = list(_structure_fallbacks(model))
    yield from structure
    if structure:
        # The checks below walk over what is not there.
        return
    if getattr(native, "__func__", None) is not _KNOWN_CODE[QwenImage21Transformer2DModel]:
        yield Fallback("module_hooks", "patched forward on the model")
    if not model.config.causal_condition:
        yield Fallback("not_causal")
    yield from tensor_fallbacks([*model.parameters(), *model.buffers()], device)
    for block in model.transformer_blocks:
        if type(block.attn.processor) not in _KNOWN_PROCESSORS:
            yield Fallback("attention_processor", type(block.attn.processor).__name__)
    for backend in attention_backends([block.attn for block in model.transformer_blocks]):
        if backend not in _TESTED_BACKENDS:
            yield Fallback("attention_backend", backend)


def _structure_fallbacks(model: QwenImage21Transformer2DModel) -> Iterator[Fallback]:
    missing = _FORWARD_ARGUMENTS - set(inspect.signature(type(model).forward).parameters)
    if missing:
        yield Fallback("structure_unknown", f"forward has no {sorted(missing)}")
    for known, code in _KNOWN_CODE.items():
        name = "__call__" if known in _KNOWN_PROCESSORS else "forward"
        if getattr(known, name) is not code:
            yield Fallback("module_hooks", f"patched {name} of {known.__name__}")
    differing = _differing(model, _MODEL_CHILDREN)
    if differing:
        yield Fallback("structure_unknown", f"model: {differing}")
        return
    replaced = [_replaced(model.norm_out, qwen.QwenImage21AdaLayerNormContinuous)]
    replaced += [_replaced(model.pos_embed, qwen.QwenImage21Rope)]
    replaced += [_replaced(model.time_text_embed, qwen.QwenImage21TimestepProjEmbeddings)]
    for index, block in enumerate(model.transformer_blocks):
        differing = _differing(block, _BLOCK_CHILDREN)
        if not differing:
            # `fuse_projections` adds a projection that the 2.1 processors do not use.
            differing = _differing(block.attn, _ATTENTION_CHILDREN, {"to_qkv"})
        if differing:
            yield Fallback("structure_unknown", f"block {index}: {differing}")
            return
        replaced += [_replaced(block, qwen.QwenImage21TransformerBlock)]
        replaced += [_replaced(block.attn, qwen.QwenImage21Attention)]
        replaced += [_replaced(block.img_mlp, qwen.QwenImage21SwiGLUFeedForward)]
    for name in filter(None, replaced):
        yield Fallback("structure_unknown", name)
        return


def _replaced(module: torch.nn.Module, known: type) -> str | None:
    """The class of a module, unless it is the one whose code our step knows."""
    return None if type(module) is known else type(module).__name__


def _differing(
    module: torch.nn.Module, children: set[str], also: frozenset[str] | set[str] = frozenset()
) -> list[str]:
    return sorted(({name for name, _ in module.named_children()} ^ children) - also)


def _parallel_fallbacks(model: QwenImage21Transformer2DModel) -> Iterator[Fallback]:
    configs = [model._parallel_config]
    configs += [
        getattr(block.attn.processor, "_parallel_config", None)
        for block in model.transformer_blocks
    ]
    for config in filter(None, configs):
        tensor = getattr(config, "tensor_parallel_config", None)
        context = getattr(config, "context_parallel_config", None)
        if tensor is not None:
            yield Fallback("tensor_parallel")
        if context is not None and context.ring_degree > 1:
            yield Fallback("ring_parallel")
        if context is not None and context.ulysses_degree > 1:
            yield Fallback("sequence_parallel")


def attention_backends(attentions: Iterable[torch.nn.Module]) -> list[str]:
    """Names of the attention backends that the blocks' attention would use now, sorted."""
    active = _AttentionBackendRegistry.get_active_backend()[0]
    backends = {
        getattr(attention.processor, "_attention_backend", None) or active
        for attention in attentions
    }
    # Through `value`: the names are an enum of strings, but a plain string may be set too.
    return sorted({str(getattr(backend, "value", backend)) for backend in backends})


class CallChecks:
    """Checks of single calls; made once a model, since the signature is looked at here.

    Parameters
    ----------
    model
        The transformer.
    """

    def __init__(self, model: QwenImage21Transformer2DModel) -> None:
        self._layers = len(getattr(model, "transformer_blocks", ()))
        # Arguments of a later diffusers: harmless as long as they keep their defaults.
        self._defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(type(model).forward).parameters.items()
        }

    def fallback(self, call: ModelCall) -> Fallback | None:
        """Why one call must take the model's own path."""
        if call.phase is Phase.UNCACHED:
            return Fallback("no_kv_cache")
        if call.arguments["encoder_hidden_states_mask"] is not None:
            return Fallback("padded_text")
        for name in call.arguments.keys() - _FORWARD_ARGUMENTS:
            if name not in self._defaults or call.arguments[name] is not self._defaults[name]:
                return Fallback("structure_unknown", f"argument {name} of forward")
        return self._kv_cache_fallback(call)

    def _kv_cache_fallback(self, call: ModelCall) -> Fallback | None:
        kv_cache = call.arguments["kv_cache"]
        if type(kv_cache) is not QwenImage21KVCache:
            return _kv_type_fallback(kv_cache, None, call.dtype)
        for layer in kv_cache.layer_caches:
            if type(layer) is not QwenImage21KVLayerCache:
                return _kv_type_fallback(layer, getattr(layer, "k", None), call.dtype)
        if len(kv_cache.layer_caches) != self._layers:
            return Fallback("kv_cache_type", f"{len(kv_cache.layer_caches)} layers")
        return None


def _kv_type_fallback(holder: object, stored: object, dtype: torch.dtype) -> Fallback:
    """A cache of another class: quantised, if it says so or has stored another type."""
    name = type(holder).__name__
    if "quant" in name.lower() or getattr(stored, "dtype", dtype) != dtype:
        return Fallback("kv_quantized", name)
    return Fallback("kv_cache_type", name)
