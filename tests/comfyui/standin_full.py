"""The stand-in with the mathematics of the real blocks, for what computes them again.

Written after diffusers' `QwenImage21TransformerBlock`, in torch's plain operations, with the module
names and the rotary table of ComfyUI's native model.
"""

from __future__ import annotations

import torch
from standin import Block, QwenImage21Transformer2DModel
from torch import nn


class FullAttention(nn.Module):
    def __init__(self, width, heads, ops, **where):
        super().__init__()
        self.heads = heads
        for name in ("to_q", "to_k", "to_v"):
            setattr(self, name, ops.Linear(width, width, bias=False, **where))
        self.to_out = nn.ModuleList([ops.Linear(width, width, bias=False, **where)])
        self.norm_q = ops.RMSNorm(width // heads, eps=1e-6, **where)
        self.norm_k = ops.RMSNorm(width // heads, eps=1e-6, **where)

    def forward(self, x, pe, attn_fn, prefix_len, transformer_options={}):  # noqa: B006
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1))
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        q, k = _turned(self.norm_q(q), pe), _turned(self.norm_k(k), pe)
        return self.to_out[0](attn_fn(q, k, v, self.heads))


def _turned(x, table):
    pairs = x.float().unflatten(-1, (-1, 2)).unsqueeze(-2)
    return (table.float() * pairs).sum(-1).flatten(-2).to(x.dtype)


class FullMLP(nn.Module):
    def __init__(self, width, ops, **where):
        super().__init__()
        self.proj = ops.Linear(width, 2 * width, bias=False, **where)
        self.gate_layer = ops.Linear(width, 2 * width, bias=False, **where)
        self.out = ops.Linear(2 * width, width, bias=False, **where)

    def forward(self, x):
        return self.out(nn.functional.silu(self.gate_layer(x)) * self.proj(x))


class FullBlock(Block):
    def __init__(self, width, heads, ops, **where):
        nn.Module.__init__(self)
        norm = {"elementwise_affine": False, "eps": 1e-6, **where}
        self.img_norm1 = ops.LayerNorm(width, **norm)
        self.attn = FullAttention(width, heads, ops, **where)
        self.img_norm2 = ops.LayerNorm(width, **norm)
        self.img_mlp = FullMLP(width, ops, **where)

    def run(self, x, mod, pe, attn_fn, prefix_len):
        scale1, gate1, scale2, gate2 = (self.rows(part, x, prefix_len) for part in mod)
        x = x + gate1 * self.attn(self.img_norm1(x) * (1 + scale1), pe, attn_fn, prefix_len)
        return x + gate2 * self.img_mlp(self.img_norm2(x) * (1 + scale2))


class FullLastLayer(nn.Module):
    def __init__(self, width, ops, **where):
        super().__init__()
        self.linear = ops.Linear(width, width, bias=False, **where)
        self.norm = ops.LayerNorm(width, 1e-6, elementwise_affine=False, **where)

    def forward(self, x, temb):
        return self.norm(x) * (1 + self.linear(nn.functional.silu(temb)).unsqueeze(1))


class FullModel(QwenImage21Transformer2DModel):
    block_class = FullBlock

    def __init__(self, *, dtype=None, device=None, operations=None, **options):
        super().__init__(dtype=dtype, device=device, operations=operations, **options)
        where = {"dtype": dtype, "device": device}
        self.norm_out = FullLastLayer(self.inner_dim, operations, **where)

    def build_sequence(self, x, context, ref_latents, image_slots):
        hidden, table, segments = super().build_sequence(x, context, ref_latents, image_slots)
        # From one angle a token to a matrix for each pair of channels, slower from pair to pair.
        head = self.inner_dim // self.transformer_blocks[0].attn.heads
        angle = torch.atan2(table[..., 1].float(), table[..., 0].float())
        angle = angle[..., None] / (1 + torch.arange(head // 2, device=x.device))
        cosine, sine = angle.cos(), angle.sin()
        rows = [torch.stack([cosine, -sine], -1), torch.stack([sine, cosine], -1)]
        return hidden, torch.stack(rows, -2), segments
