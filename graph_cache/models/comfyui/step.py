"""The decode step of ComfyUI's native Qwen-Image-2.1, over static tensors and persistent K/V.

It calls the model's own modules, blocks included, in the order of the model's ``_forward``; so
quantised weights, streamed weights and the choice of attention are the model's own. It gives each
block an ``attn_fn`` over our buffers, which is the door that the model itself has for its cache.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable

import torch
from torch import nn

from ...capture import StaticInputs
from ...prefix import PrefixBuffers
from . import core
from .residency import Residency


@functools.cache
def modulation_parts(block: type[nn.Module]) -> int:
    """How many parts a block takes its modulation in: 4, or 5 with a tensor of zeros at the end.

    Read from the block's code, since versions of ComfyUI differ and no call tells; 0 where the
    code does not say.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(block.forward)))
    except (OSError, TypeError, SyntaxError):
        return 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.value, "id", None) == "mod":
            targets = node.targets[0]
            return len(targets.elts) if isinstance(targets, ast.Tuple) else 0
    return 0


def static_inputs(latent: torch.Tensor, timestep: torch.Tensor, rope: torch.Tensor) -> StaticInputs:
    """New static inputs of `decode`.

    Parameters
    ----------
    latent
        ``(batch, channels, height, width)``, as the model is called with.
    timestep
        ``(batch,)`` float32, the noise level in (0, 1].
    rope
        The target's rotary table, ``(1, target, 1, head_dim / 2, 2, 2)``.

    Returns
    -------
    StaticInputs
        ``latent`` and ``timestep`` are new at every step, ``rope`` at every run.
    """
    return StaticInputs({"latent": latent, "timestep": timestep, "rope": rope}, output=latent)


def target_rope(
    model: nn.Module, latent: torch.Tensor, context: torch.Tensor, references: list, slots: list
) -> torch.Tensor:
    """The target's rotary table, from the model's own sequence."""
    height, width = latent.shape[-2:]
    _, table, _ = model.build_sequence(latent, context, list(references), list(slots))
    return table[:, -height * width :]


def decode(
    model: nn.Module,
    inputs: StaticInputs,
    buffers: PrefixBuffers,
    options: dict,
    residency: Residency,
    lend: bool,
) -> torch.Tensor:
    """One decode step; it never waits for the GPU unless weights have to be brought to it.

    Parameters
    ----------
    model
        The native transformer.
    inputs
        Made by `static_inputs`, with the step's values loaded.
    buffers
        With the prefix stored. The target's K/V are written to them.
    options
        ComfyUI's ``transformer_options`` of the call; blocks and attention read them.
    residency
        Where weights are not all on the device, ComfyUI brings each block's while the one before
        is computed.
    lend
        Give attention the buffers themselves; otherwise copies, as the model's own path does. A
        function that is not known may work in place.

    Returns
    -------
    torch.Tensor
        ``(batch, out_channels, height, width)``, bit for bit what the model's cached step returns.
    """
    latent = inputs["latent"]
    batch, _, height, width = latent.shape
    dtype = latent.dtype
    blocks = list(model.transformer_blocks)
    options = {**options, "total_blocks": len(blocks), "block_type": "single"}
    hidden = model.img_in(latent.flatten(2).transpose(1, 2))
    temb = time_embedding(model, inputs, dtype)
    modulation = _modulation(model, temb, modulation_parts(type(blocks[0])))
    attention = core.optimized_attention(model)
    queue_options = {} if residency.complete else options
    with core.prefetched_blocks(blocks, latent.device, dtype, queue_options) as bring:
        for index, block in enumerate(blocks):
            bring(block)
            options["block_index"] = index
            attend = _attention(attention, buffers, index, options, lend)
            hidden = block(hidden, modulation, inputs["rope"], attend, 0, options)
        bring(None)
    hidden = model.proj_out(model.norm_out(hidden, temb[:-1]))
    return hidden.transpose(1, 2).reshape(batch, model.out_channels, height, width)


def time_embedding(model: nn.Module, inputs: StaticInputs, dtype: torch.dtype) -> torch.Tensor:
    """Embeddings of the step's timesteps and of t = 0, ``(batch + 1, width)``."""
    # As the model does: t * 1000 and t are rounded to the compute dtype, and a row of t = 0 for
    # text and references comes last. No decode step reads that row, but a matrix product over
    # another number of rows may round otherwise.
    timestep = ((inputs["timestep"] * 1000).to(dtype) / 1000).to(dtype)
    return model.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), dtype)


def _modulation(model: nn.Module, temb: torch.Tensor, parts: int) -> tuple:
    """The blocks' shared modulation: pairs of rows, (t = 0, sampled t)."""
    scale1, gate1, scale2, gate2 = model.modulation(temb).chunk(4, dim=-1)
    rows = [
        (part[-1:].unsqueeze(1), part[:-1].unsqueeze(1))
        for part in (scale1, gate1.tanh(), scale2, gate2.tanh())
    ]
    return (*rows, torch.zeros_like(scale1[:1, None])) if parts == 5 else tuple(rows)


def _attention(
    attention: Callable[..., torch.Tensor],
    buffers: PrefixBuffers,
    layer: int,
    options: dict,
    lend: bool,
) -> Callable[..., torch.Tensor]:
    """A block's ``attn_fn``: the target over [prefix | target]."""

    def attend(query, key, value, heads, **how):
        target_key, target_value = buffers.target(layer)
        target_key.copy_(key)
        target_value.copy_(value)
        joined_key, joined_value = buffers.joined(layer)
        if not lend:
            joined_key, joined_value = joined_key.clone(), joined_value.clone()
        return attention(
            query.flatten(2),
            joined_key.flatten(2),
            joined_value.flatten(2),
            heads,
            transformer_options=options,
            **how,
        )

    return attend
