"""The Triton kernels themselves. Importable only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x,
    y,
    gate,
    scale,
    normed,
    tokens,
    width,
    eps,
    gated: tl.constexpr,
    clamped: tl.constexpr,
    block: tl.constexpr,
):
    """A row: ``x += gate * y`` where gated, then layer norm of x times scale."""
    row = tl.program_id(0).to(tl.int64)
    sample = row // tokens
    columns = tl.arange(0, block)
    inside = columns < width
    at = row * width + columns
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if gated:
        more = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        total += more * tl.load(gate + sample * width + columns, mask=inside, other=0.0)
        if clamped:
            total = tl.minimum(tl.maximum(total, -65504.0), 65504.0)
        tl.store(x + at, total.to(x.dtype.element_ty), mask=inside)
    mean = tl.sum(total, axis=0) / width
    away = tl.where(inside, total - mean, 0.0)
    # Of the differences: a difference of squares would lose what a large mean leaves of it.
    variance = tl.sum(away * away, axis=0) / width
    factor = tl.load(scale + sample * width + columns, mask=inside, other=0.0)
    result = away * tl.rsqrt(variance + eps) * factor
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _turned(x, weight, cosine, sine, eps, head_dim: tl.constexpr, block: tl.constexpr):
    """RMS norm of ``(block, head_dim)`` and rotation of its neighbouring pairs."""
    mean = tl.sum(x * x, axis=1) / head_dim
    x = x * tl.rsqrt(mean + eps)[:, None] * weight[None, :]
    even, odd = tl.split(tl.reshape(x, (block, head_dim // 2, 2)))
    first = even * cosine[None, :] - odd * sine[None, :]
    second = even * sine[None, :] + odd * cosine[None, :]
    return tl.reshape(tl.join(first, second), (block, head_dim))


@triton.jit
def turn_kernel(
    query,
    key,
    value,
    query_weight,
    key_weight,
    rope,
    out,
    key_out,
    value_out,
    tokens,
    heads,
    eps,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    o_batch,
    o_token,
    o_head,
    ko_batch,
    ko_token,
    ko_head,
    vo_batch,
    vo_token,
    vo_head,
    head_dim: tl.constexpr,
    block: tl.constexpr,
):
    """Some heads of a token: query and key normed and turned, key and value into the buffers."""
    row = tl.program_id(0).to(tl.int64)
    sample, token = row // tokens, row % tokens
    head = tl.program_id(1) * block + tl.arange(0, block)
    channel = tl.arange(0, head_dim)
    pair = tl.arange(0, head_dim // 2)
    inside = (head < heads)[:, None] & (channel >= 0)[None, :]
    cosine = tl.load(rope + token * head_dim + 2 * pair)
    sine = tl.load(rope + token * head_dim + 2 * pair + 1)
    # Query.
    at = sample * q_batch + token * q_token + head[:, None] * q_head + channel[None, :]
    x = tl.load(query + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(query_weight + channel).to(tl.float32)
    x = _turned(x, weight, cosine, sine, eps, head_dim, block)
    at = sample * o_batch + token * o_token + head[:, None] * o_head + channel[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), mask=inside)
    # Key.
    at = sample * k_batch + token * k_token + head[:, None] * k_head + channel[None, :]
    x = tl.load(key + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(key_weight + channel).to(tl.float32)
    x = _turned(x, weight, cosine, sine, eps, head_dim, block)
    at = sample * ko_batch + token * ko_token + head[:, None] * ko_head + channel[None, :]
    tl.store(key_out + at, x.to(key_out.dtype.element_ty), mask=inside)
    # Value.
    at = sample * v_batch + token * v_token + head[:, None] * v_head + channel[None, :]
    x = tl.load(value + at, mask=inside, other=0.0)
    at = sample * vo_batch + token * vo_token + head[:, None] * vo_head + channel[None, :]
    tl.store(value_out + at, x, mask=inside)


@triton.jit
def swiglu_kernel(
    gate,
    value,
    out,
    tokens,
    width,
    g_batch,
    g_token,
    v_batch,
    v_token,
    block: tl.constexpr,
):
    """A part of a row: ``silu(gate) * value``."""
    row = tl.program_id(0).to(tl.int64)
    sample, token = row // tokens, row % tokens
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    at = sample * g_batch + token * g_token + columns
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    at = sample * v_batch + token * v_token + columns
    y = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
    result = x / (1.0 + tl.exp(-x)) * y
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)
