"""The decode step of diffusers' Qwen-Image-2.1, over static tensors and persistent K/V.

It calls the model's own modules in the order of `QwenImage21TransformerBlock.forward`, so every
result is the one that the model's cached step rounds to; what it leaves out is what does not
change from step to step, or from block to block.
"""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel

from ..capture import StaticInputs
from ..layout import SequenceLayout
from ..prefix import PrefixBuffers


def static_inputs(
    model: QwenImage21Transformer2DModel, hidden: torch.Tensor, layout: SequenceLayout
) -> StaticInputs:
    """New static inputs of `decode`.

    Parameters
    ----------
    model
        The transformer.
    hidden
        Hidden states of the call, ``(batch, references + target, channels)``.
    layout
        Of the call.

    Returns
    -------
    StaticInputs
        ``hidden`` (batch, target, channels) and ``timestep`` (batch,), new at every step; ``rope``
        (target, head_dim / 2) complex64, new at every run; ``all_timesteps`` (batch + 1,) is the
        step's own.
    """
    batch, target = hidden.shape[0], layout.target_tokens
    rope = sum(freqs.shape[1] for freqs in model.pos_embed.freqs)
    inputs = StaticInputs(
        {
            # In the memory layout of the call, see `CacheKey`.
            "hidden": torch.empty_like(hidden[:, -target:]),
            "timestep": hidden.new_empty(batch),
            "rope": torch.empty(target, rope, dtype=torch.complex64, device=hidden.device),
            "all_timesteps": hidden.new_empty(batch + 1),
        },
        output=hidden.new_empty(batch, target, model.proj_out.out_features),
    )
    # The last row stays at t = 0, from which text and references are modulated. No decode step
    # reads it, but a matrix product over another number of rows may round otherwise.
    inputs["all_timesteps"].zero_()
    return inputs


def target_rope(
    model: QwenImage21Transformer2DModel, layout: SequenceLayout, device: torch.device
) -> torch.Tensor:
    """Rotary frequencies of the target, ``(target, head_dim / 2)`` complex64.

    Its frame position depends on everything before it.
    """
    # The mask stays on the CPU: `pos_embed` walks over it in Python.
    mask = torch.tensor(layout.image_mask())
    rope = model.pos_embed([*layout.references, layout.target], mask, device=device)
    return rope[layout.prefix_tokens :]


def decode(
    model: QwenImage21Transformer2DModel, inputs: StaticInputs, buffers: PrefixBuffers
) -> torch.Tensor:
    """One decode step; it never waits for the GPU.

    Parameters
    ----------
    model
        The transformer.
    inputs
        Made by `static_inputs`, with the step's values loaded.
    buffers
        With the prefix stored. The target's K/V are written to them.

    Returns
    -------
    torch.Tensor
        ``(batch, target, out_channels)``, bit for bit what the model's cached step returns.
    """
    batch = buffers.shape.batch
    hidden = model.img_in(inputs["hidden"])
    temb = time_embedding(model, inputs, hidden)
    # The model works this out again in every block, and for every token.
    scale1, gate1, scale2, gate2 = (
        part[:batch].unsqueeze(1) for part in model.modulation(temb).chunk(4, dim=-1)
    )
    scale1, scale2, gate1, gate2 = 1 + scale1, 1 + scale2, gate1.tanh(), gate2.tanh()
    for index, block in enumerate(model.transformer_blocks):
        normed = block.img_norm1(hidden) * scale1
        hidden = hidden + gate1 * _attend(block.attn, normed, inputs["rope"], buffers, index)
        hidden = hidden + gate2 * block.img_mlp(block.img_norm2(hidden) * scale2)
        if hidden.dtype == torch.float16:
            hidden = hidden.clip(-65504, 65504)
    norm = model.norm_out
    scale = norm.linear(norm.silu(temb).to(hidden.dtype))[:batch].unsqueeze(1)
    return model.proj_out(norm.norm(hidden) * (1 + scale))


def time_embedding(
    model: QwenImage21Transformer2DModel, inputs: StaticInputs, hidden: torch.Tensor
) -> torch.Tensor:
    """Embeddings of the step's timesteps and of t = 0, ``(batch + 1, width)``."""
    timesteps = inputs["all_timesteps"]
    timesteps[: len(inputs["timestep"])].copy_(inputs["timestep"])
    return model.time_text_embed(timesteps, hidden)


def _attend(
    attn: torch.nn.Module,
    hidden: torch.Tensor,
    rope: torch.Tensor,
    buffers: PrefixBuffers,
    layer: int,
) -> torch.Tensor:
    """A block's attention of the target over [prefix | target]: ``(batch, target, width)``."""
    heads = (-1, buffers.shape.head_dim)
    value = attn.to_v(hidden).unflatten(-1, heads)
    query = attn.norm_q(attn.to_q(hidden).unflatten(-1, heads)).to(value.dtype)
    key = attn.norm_k(attn.to_k(hidden).unflatten(-1, heads)).to(value.dtype)
    target_key, target_value = buffers.target(layer)
    # The copy rounds the float32 result as a conversion would, and saves its pass over memory.
    target_key.copy_(_rotate(key, rope))
    target_value.copy_(value)
    joined_key, joined_value = buffers.joined(layer)
    out = dispatch_attention_fn(
        _rotate(query, rope).to(value.dtype),
        joined_key,
        joined_value,
        attn_mask=None,
        dropout_p=0.0,
        backend=attn.processor._attention_backend,
        parallel_config=None,
    )
    out = out.flatten(2, 3).type_as(value)
    return attn.to_out[1](attn.to_out[0](out))


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in float32, as diffusers' `apply_rotary_emb_qwen` computes it.

    Parameters
    ----------
    x
        ``(batch, tokens, heads, head_dim)``.
    rope
        ``(tokens, head_dim / 2)``, complex64.

    Returns
    -------
    torch.Tensor
        Of x's shape, float32.
    """
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rope.unsqueeze(1)).flatten(3)
