"""The fast profile's decode step of ComfyUI's native Qwen-Image-2.1.

Linear layers are the model's own modules, called one by one: quantised weights, and weights that
ComfyUI brings as they are used, are ComfyUI's business. What is done otherwise is between them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap

import torch
from torch import nn

from ...capture import StaticInputs
from ...fast import FastBlock, FastModel, Ops, choose_ops, decode
from ...fast.attention import best_attention
from ...fast.step import Modulation
from ...prefix import PrefixBuffers
from . import core
from .residency import Residency
from .step import time_embedding

_BLOCK_CHILDREN = {"img_norm1", "attn", "img_norm2", "img_mlp"}
_ATTENTION_CHILDREN = {"to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k"}
_LAST_CHILDREN = {"linear", "norm"}
_GIVES_WAY = {"attention_pytorch", "attention_flash"}
"""Attention functions that nobody chose for what they do to the picture."""


KNOWN_CODE = {"e4751757c36a24bd": "late September 2026"}
"""Versions of the native code that this step does again, by `code_of`."""


def code_of(model: nn.Module) -> str:
    """Fingerprint of a model's code that `step` does again; what ComfyUI changes, changes it."""
    block = model.transformer_blocks[0]
    module = sys.modules.get(type(block).__module__)
    functions = [type(model)._forward, type(block).forward, type(block.attn).forward]
    functions += [type(model.norm_out).forward]
    helpers = ("_split_rows", "_modulated_norm", "_gated_residual")
    functions += [getattr(module, name, None) for name in helpers]
    return _fingerprint(tuple(functions))


@functools.lru_cache(maxsize=4)
def _fingerprint(functions: tuple) -> str:
    digest = hashlib.sha256()
    for function in functions:
        if function is not None:
            try:
                source = textwrap.dedent(inspect.getsource(function))
                # Without comments and layout.
                digest.update(ast.unparse(ast.parse(source)).encode())
            except (OSError, TypeError, SyntaxError):
                return "no source"
    return digest.hexdigest()[:16]


def obstacle(model: nn.Module, dtype: torch.dtype, attention: set[str]) -> str:
    """What about a model the fast step does not know; empty if nothing.

    Parameters
    ----------
    model
        The native transformer.
    dtype
        That it computes in.
    attention
        Names of the attention functions that its blocks would use.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in {dtype}"
    if attention - _GIVES_WAY:
        return f"{', '.join(sorted(attention - _GIVES_WAY))} was chosen"
    differing = _differing(model.norm_out, _LAST_CHILDREN)
    if differing:
        return f"other parts of the last layer: {differing}"
    eps = {model.norm_out.norm.eps}
    for block in model.transformer_blocks:
        differing = _differing(block, _BLOCK_CHILDREN) or _differing(
            block.attn, _ATTENTION_CHILDREN
        )
        if differing:
            return f"other parts of a block: {differing}"
        if len(block.attn.to_out) != 1:
            return "more than a projection after attention"
        norms = (block.img_norm1, block.img_norm2, model.norm_out.norm)
        if any(norm.weight is not None for norm in norms):
            return "norms with weights"
        eps |= {norm.eps for norm in norms}
    if len(eps) != 1:
        return "norms that differ"
    code = code_of(model)
    return "" if code in KNOWN_CODE else f"another version of ComfyUI's model, {code}"


def _differing(module: nn.Module, known: set[str]) -> str:
    children = {name for name, _ in module.named_children()} - {"comfy_attention"}
    return ", ".join(sorted(children ^ known))


def fast_model(
    model: nn.Module, device: torch.device, dtype: torch.dtype, attention: set[str]
) -> FastModel | str:
    """A model's blocks for the fast step, or what about the model that does not know.

    Parameters
    ----------
    model
        The native transformer.
    device, dtype
        Where and in what it computes.
    attention
        Names of the attention functions that its blocks would use.
    """
    problem = obstacle(model, dtype, attention)
    if problem:
        return problem
    heads = model.transformer_blocks[0].attn.heads
    head_dim = model.inner_dim // heads
    ops = choose_ops(device, dtype, model.inner_dim, head_dim)
    if isinstance(ops, str):
        return ops
    return FastModel(
        blocks=[_block(block, ops) for block in model.transformer_blocks],
        eps=model.norm_out.norm.eps,
        ops=ops,
        attention=best_attention(device, dtype, heads, head_dim),
    )


def _block(block: nn.Module, ops: Ops) -> FastBlock:
    attn = block.attn

    def turn(query, key, value, rope, target):
        with core.weights_of((attn.norm_q, attn.norm_k), query) as norms:
            return ops.turn(query, key, value, (*norms, attn.norm_q.eps), rope, target)

    return FastBlock(
        qkv=lambda x: [layer(x) for layer in (attn.to_q, attn.to_k, attn.to_v)],
        turn=turn,
        out=attn.to_out[0],
        mlp=block.img_mlp,
    )


def step(
    model: nn.Module,
    fast: FastModel,
    inputs: StaticInputs,
    buffers: PrefixBuffers,
    options: dict,
    residency: Residency,
) -> torch.Tensor:
    """One fast decode step; it never waits for the GPU unless weights have to be brought to it.

    Parameters
    ----------
    model
        The native transformer.
    fast
        Its blocks.
    inputs, buffers, options, residency
        As of `graph_cache.models.comfyui.step.decode`.

    Returns
    -------
    torch.Tensor
        ``(batch, out_channels, height, width)``.
    """
    latent = inputs["latent"]
    batch, _, height, width = latent.shape
    hidden = model.img_in(latent.flatten(2).transpose(1, 2)).contiguous()
    temb = time_embedding(model, inputs, latent.dtype)
    scale1, gate1, scale2, gate2 = (
        part[:-1].float() for part in model.modulation(temb).chunk(4, dim=-1)
    )
    norm = model.norm_out
    scale_out = norm.linear(nn.functional.silu(temb[:-1])).float()
    modulation = Modulation(1 + scale1, gate1.tanh(), 1 + scale2, gate2.tanh(), 1 + scale_out)
    # The first column of each pair's matrix: cosine and sine.
    rope = inputs["rope"][0, :, 0, :, :, 0].float().contiguous()
    blocks = list(model.transformer_blocks)
    options = {} if residency.complete else options
    with core.prefetched_blocks(blocks, latent.device, latent.dtype, options) as bring:
        hidden = decode(fast, hidden, modulation, rope, buffers, lambda index: bring(blocks[index]))
        bring(None)
    out = model.proj_out(hidden)
    return out.transpose(1, 2).reshape(batch, model.out_channels, height, width)
