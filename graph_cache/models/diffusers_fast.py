"""The fast profile's decode step of diffusers' Qwen-Image-2.1."""

from __future__ import annotations

import functools

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21SwiGLUFeedForward,
    QwenImage21Transformer2DModel,
    QwenImage21TransformerBlock,
)
from torch import nn

from ..capture import StaticInputs
from ..fast import FastBlock, FastModel, FusedLinear, Ops, choose_ops, decode
from ..fast.attention import Attention, best_attention
from ..fast.step import Modulation
from ..prefix import PrefixBuffers
from . import diffusers_step

# Code that our step does again, besides what every step does. Taken at import, so that a patch of
# it later is seen.
_KNOWN_CODE = {known: known.forward for known in (QwenImage21SwiGLUFeedForward, RMSNorm)}


def obstacle(model: QwenImage21Transformer2DModel, dtype: torch.dtype) -> str:
    """What about a model the fast step does not know; empty if nothing."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in {dtype}"
    for known, code in _KNOWN_CODE.items():
        if known.forward is not code:
            return f"patched forward of {known.__name__}"
    norms = [model.norm_out.norm]
    for block in model.transformer_blocks:
        norms += [block.img_norm1, block.img_norm2]
        if type(block.img_mlp.activation_fn) is not nn.SiLU:
            return f"activation {type(block.img_mlp.activation_fn).__name__}"
        if type(block.attn.to_out[1]) is not nn.Dropout or block.attn.to_out[1].p:
            return "dropout after attention"
        for norm in (block.attn.norm_q, block.attn.norm_k):
            if type(norm) is not RMSNorm or norm.weight is None or norm.bias is not None:
                return f"norm {type(norm).__name__} of query or key"
    for norm in norms:
        if type(norm) is not nn.LayerNorm or norm.elementwise_affine or norm.eps != norms[0].eps:
            return f"norm {type(norm).__name__}"
    return ""


def fast_model(
    model: QwenImage21Transformer2DModel, device: torch.device, dtype: torch.dtype, attention: str
) -> FastModel | str:
    """A model's blocks for the fast step, or what about the model that does not know.

    Parameters
    ----------
    model
        The transformer.
    device, dtype
        Where and in what it runs.
    attention
        Name of diffusers' attention backend. The default gives way to the device's best kernel;
        one that was chosen is kept.
    """
    problem = obstacle(model, dtype)
    if problem:
        return problem
    if "," in attention:
        return f"its blocks have attention of several kinds, {attention}"
    heads, head_dim = model.config.num_attention_heads, model.config.attention_head_dim
    ops = choose_ops(device, dtype, heads * head_dim, head_dim)
    if isinstance(ops, str):
        return ops
    if attention == "native":
        chosen = best_attention(device, dtype, heads, head_dim)
    else:
        chosen = Attention(attention, functools.partial(_dispatched, attention))
    joined: dict[str, list[FusedLinear]] = {"qkv": [], "gate_up": []}
    blocks = []
    for block in model.transformer_blocks:
        attn, mlp = block.attn, block.img_mlp
        # Looked up at each use, for a module can be replaced between two steps.
        qkv = FusedLinear(lambda attn=attn: (attn.to_q, attn.to_k, attn.to_v))
        gate_up = FusedLinear(lambda mlp=mlp: (mlp.gate_layer, mlp.proj))
        joined["qkv"].append(qkv)
        joined["gate_up"].append(gate_up)
        blocks.append(_block(block, qkv, gate_up, ops))
    return FastModel(blocks, model.norm_out.norm.eps, ops, chosen, joined)


def _dispatched(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    return dispatch_attention_fn(query, key, value, backend=backend)


def _block(
    block: QwenImage21TransformerBlock, qkv: FusedLinear, gate_up: FusedLinear, ops: Ops
) -> FastBlock:
    attn = block.attn

    def turn(query, key, value, rope, target):
        norms = (attn.norm_q.weight, attn.norm_k.weight, attn.norm_q.eps)
        return ops.turn(query, key, value, norms, rope, target)

    return FastBlock(
        qkv=qkv,
        turn=turn,
        out=lambda x: attn.to_out[0](x),
        mlp=lambda x: block.img_mlp.out(ops.swiglu(*gate_up(x))),
    )


def step(
    model: QwenImage21Transformer2DModel,
    fast: FastModel,
    inputs: StaticInputs,
    buffers: PrefixBuffers,
) -> torch.Tensor:
    """One fast decode step; it never waits for the GPU.

    Parameters
    ----------
    model
        The transformer.
    fast
        Its blocks.
    inputs, buffers
        As of `graph_cache.models.diffusers_step.decode`.

    Returns
    -------
    torch.Tensor
        ``(batch, target, out_channels)``.
    """
    batch = buffers.shape.batch
    hidden = model.img_in(inputs["hidden"]).contiguous()
    temb = diffusers_step.time_embedding(model, inputs, hidden)
    scale1, gate1, scale2, gate2 = (
        part[:batch].float() for part in model.modulation(temb).chunk(4, dim=-1)
    )
    norm = model.norm_out
    scale_out = norm.linear(norm.silu(temb).to(hidden.dtype))[:batch].float()
    modulation = Modulation(1 + scale1, gate1.tanh(), 1 + scale2, gate2.tanh(), 1 + scale_out)
    rope = torch.view_as_real(inputs["rope"])
    return model.proj_out(decode(fast, hidden, modulation, rope, buffers))
