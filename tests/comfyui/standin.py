"""A small model with the contract of ComfyUI's native Qwen-Image-2.1, for versions without it.

Written for these tests: the names of its modules, the signatures of `forward` and of its blocks,
`build_sequence` and the prefix cache of one run are what a cache in front of the real model
relies on. The mathematics between them is as small as it can be without becoming blind to a wrong
prefix, position, noise level or weight.
"""

from __future__ import annotations

import comfy.model_base
import comfy.ops
import comfy.supported_models_base
import torch
from comfy import conds, latent_formats, patcher_extension
from comfy.ldm.modules.attention import optimized_attention
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, ops, **where):
        super().__init__()
        self.heads = heads
        self.to_q = ops.Linear(width, width, bias=False, **where)
        self.to_k = ops.Linear(width, width, bias=False, **where)
        self.to_v = ops.Linear(width, width, bias=False, **where)
        self.to_out = nn.ModuleList([ops.Linear(width, width, bias=False, **where)])

    def forward(self, x, pe, attn_fn, prefix_len, transformer_options={}):  # noqa: B006
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1))
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        # Positions turn queries and keys, as any rotary embedding does.
        q, k = (
            torch.cat([part * pe[..., :1], part * pe[..., 1:]], -1)[..., ::2] for part in (q, k)
        )
        return self.to_out[0](attn_fn(q.contiguous(), k.contiguous(), v, self.heads))


class Block(nn.Module):
    """Takes its modulation in five parts, the last one zeros."""

    def __init__(self, width, heads, ops, **where):
        super().__init__()
        self.attn = Attention(width, heads, ops, **where)
        self.img_mlp = ops.Linear(width, width, bias=False, **where)

    def forward(self, x, mod, pe, attn_fn, prefix_len, transformer_options={}):  # noqa: B006
        scale1, gate1, scale2, gate2, _zero = mod
        return self.run(x, (scale1, gate1, scale2, gate2), pe, attn_fn, prefix_len)

    def run(self, x, mod, pe, attn_fn, prefix_len):
        scale1, gate1, scale2, gate2 = (self.rows(part, x, prefix_len) for part in mod)
        # In place, as the real blocks do: nobody may rely on what a block was given.
        x.addcmul_(self.attn(_norm(x) * (1 + scale1), pe, attn_fn, prefix_len), gate1)
        return x.addcmul_(torch.tanh(self.img_mlp(_norm(x) * (1 + scale2))), gate2)

    @staticmethod
    def rows(part, x, prefix):
        still, sampled = part
        batch, length = x.shape[:2]
        return torch.cat(
            [still.expand(batch, prefix, -1), sampled.expand(batch, length - prefix, -1)], dim=1
        )


class FourPartBlock(Block):
    def forward(self, x, mod, pe, attn_fn, prefix_len, transformer_options={}):  # noqa: B006
        scale1, gate1, scale2, gate2 = mod
        return self.run(x, (scale1, gate1, scale2, gate2), pe, attn_fn, prefix_len)


def _norm(x):
    return nn.functional.layer_norm(x, x.shape[-1:])


class Timestep(nn.Module):
    def __init__(self, width, ops, **where):
        super().__init__()
        self.linear = ops.Linear(8, width, **where)

    def forward(self, timestep, dtype):
        waves = timestep.float()[:, None] * torch.arange(1, 9, device=timestep.device)
        return self.linear(torch.sin(waves).to(dtype))


class LastLayer(nn.Module):
    def __init__(self, width, ops, **where):
        super().__init__()
        self.linear = ops.Linear(width, width, bias=False, **where)

    def forward(self, x, temb):
        return _norm(x) * (1 + self.linear(temb).unsqueeze(1))


class QwenImage21Transformer2DModel(nn.Module):
    block_class = Block

    def __init__(
        self,
        in_channels=64,
        out_channels=64,
        num_layers=3,
        heads=2,
        width=32,
        context_in_dim=16,
        image_model=None,
        dtype=None,
        device=None,
        operations=None,
    ):
        super().__init__()
        where = {"dtype": dtype, "device": device}
        self.dtype = dtype
        self.out_channels = out_channels
        self.inner_dim = width
        self.time_text_embed = Timestep(width, operations, **where)
        self.txt_in = operations.Linear(context_in_dim, width, bias=False, **where)
        self.img_in = operations.Linear(in_channels, width, bias=False, **where)
        self.modulation = nn.Sequential(
            nn.SiLU(), operations.Linear(width, 4 * width, bias=False, **where)
        )
        self.transformer_blocks = nn.ModuleList(
            [self.block_class(width, heads, operations, **where) for _ in range(num_layers)]
        )
        self.norm_out = LastLayer(width, operations, **where)
        self.proj_out = operations.Linear(width, out_channels, bias=False, **where)
        self.prefix_cache = None
        self.prefix_cache_enabled = False
        self.prefills = 0

    def reset_prefix_cache(self, enabled):
        self.prefix_cache = None
        self.prefix_cache_enabled = enabled

    def build_sequence(self, x, context, ref_latents, image_slots):
        text = self.txt_in(context)
        slots = (image_slots + [text.shape[1]] * len(ref_latents))[: len(ref_latents)]
        bounds = [0, *slots, text.shape[1]]
        parts, angles, segments, position, length = [], [], [], 0, 0
        for start, end, image in zip(bounds, bounds[1:], [*ref_latents, x]):
            if end > start:
                parts.append(text[:, start:end])
                angles.append(position + torch.arange(end - start, device=x.device))
                mask = torch.ones(end - start, length + end - start, dtype=torch.bool)
                segments.append((length, length + end - start, mask.tril(length).to(x.device)))
                position, length = position + end - start, length + end - start
            height, width = image.shape[-2:]
            parts.append(self.img_in(image.flatten(2).transpose(1, 2)))
            rows = torch.arange(height, device=x.device)[:, None] - height // 2
            columns = torch.arange(width, device=x.device)[None, :] - width // 2
            angles.append((position + 0.3 * rows + 0.07 * columns).flatten())
            segments.append((length, length + height * width, None))
            position, length = position + max(height, width), length + height * width
        angle = torch.cat([part.float() for part in angles])
        table = torch.stack([angle.cos(), angle.sin()], dim=-1)
        return torch.cat(parts, dim=1), table[None, :, None].to(x.dtype), segments

    def forward(
        self,
        x,
        timestep,
        context,
        ref_latents=None,
        image_slots=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        wrappers = patcher_extension.get_all_wrappers("diffusion_model", transformer_options)
        executor = patcher_extension.WrapperExecutor.new_class_executor(
            self._forward, self, wrappers
        )
        return executor.execute(
            x, timestep, context, ref_latents, image_slots, transformer_options, **kwargs
        )

    def _forward(
        self,
        x,
        timesteps,
        context,
        ref_latents=None,
        image_slots=None,
        transformer_options={},  # noqa: B006
        **kwargs,
    ):
        references, slots = list(ref_latents or []), list(image_slots or [])
        batch, _, height, width = x.shape
        hidden, table, segments = self.build_sequence(x, context, references, slots)
        prefix = hidden.shape[1] - height * width
        timestep = ((timesteps * 1000).to(x.dtype) / 1000).to(x.dtype)
        temb = self.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), x.dtype)
        parts = self.modulation(temb).chunk(4, dim=-1)
        parts = (parts[0], parts[1].tanh(), parts[2], parts[3].tanh())
        mod = tuple((part[-1:].unsqueeze(1), part[:-1].unsqueeze(1)) for part in parts)
        if self.block_class is not FourPartBlock:
            mod = (*mod, torch.zeros_like(parts[0][:1, None]))
        options = transformer_options.get("qwen_image21_cache", {})
        patches, replaced = (transformer_options.get(k, {}) for k in ("patches", "patches_replace"))
        caching = self.prefix_cache_enabled and options.get("device") != "off"
        caching = caching and not (patches.get("post_input") or replaced.get("dit"))
        store = None
        if caching:
            key = torch.cat([part.flatten() for part in (context.float(), *references)])
            store = self._store((x.shape, tuple(r.shape for r in references), tuple(slots)), key)
        target, before = hidden[:, prefix:].clone(), hidden[:, :prefix].clone()
        for index, block in enumerate(self.transformer_blocks):
            transformer_options["block_index"] = index
            if store is None:
                attend = self._joint(segments, transformer_options)
                hidden = block(hidden, mod, table, attend, prefix, transformer_options)
                continue
            if index not in store:
                attend = self._joint(segments[:-1], transformer_options, store, index)
                rope = table[:, :prefix]
                before = block(before, mod, rope, attend, prefix, transformer_options)
            attend = self._over(store[index], transformer_options)
            target = block(target, mod, table[:, prefix:], attend, 0, transformer_options)
        if store is None:
            target = hidden[:, prefix:]
        out = self.proj_out(self.norm_out(target, temb[:-1]))
        return out.transpose(1, 2).reshape(batch, self.out_channels, height, width)

    def _store(self, layout, key):
        self.prefix_cache = self.prefix_cache or []
        for known, content, store in self.prefix_cache:
            if known == layout and torch.equal(content, key):
                return store
        self.prefills += 1
        self.prefix_cache.append((layout, key, {}))
        return self.prefix_cache[-1][2]

    @staticmethod
    def _joint(segments, options, store=None, index=0):
        def attend(q, k, v, heads, **kwargs):
            if store is not None:
                store[index] = (k.clone(), v.clone())
            outs = [
                optimized_attention(
                    q[:, start:end].flatten(2),
                    k[:, :end].flatten(2),
                    v[:, :end].flatten(2),
                    heads,
                    mask=mask,
                    transformer_options=options,
                )
                for start, end, mask in segments
            ]
            return torch.cat(outs, dim=1)

        return attend

    @staticmethod
    def _over(stored, options):
        def attend(q, k, v, heads, **kwargs):
            keys, values = (torch.cat(pair, dim=1).flatten(2) for pair in zip(stored, (k, v)))
            return optimized_attention(
                q.flatten(2), keys, values, heads, transformer_options=options
            )

        return attend


class FourPartModel(QwenImage21Transformer2DModel):
    block_class = FourPartBlock


class Latent(latent_formats.LatentFormat):
    latent_channels = 64


class Config(comfy.supported_models_base.BASE):
    unet_config = {}  # noqa: RUF012
    sampling_settings = {"multiplier": 1.0, "shift": 0.69}  # noqa: RUF012
    latent_format = Latent
    memory_usage_factor = 6.0
    supported_inference_dtypes = [torch.bfloat16, torch.float32]  # noqa: RUF012


class QwenImage21(comfy.model_base.BaseModel):
    @property
    def current_patcher(self):
        return self.__dict__.get("_patcher")

    @current_patcher.setter
    def current_patcher(self, patcher):
        self.__dict__["_patcher"] = patcher
        if "diffusion_model" in self._modules:
            enabled = patcher is not None and len(patcher.hook_patches) == 0
            self.diffusion_model.reset_prefix_cache(enabled)

    def extra_conds(self, **kwargs):
        out = super().extra_conds(**kwargs)
        out["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        if kwargs.get("reference_latents") is not None:
            out["ref_latents"] = conds.CONDList(kwargs["reference_latents"])
            out["image_slots"] = conds.CONDConstant(kwargs.get("image_slots"))
        return out


def standin_model(dtype=torch.float32, model_class=QwenImage21Transformer2DModel):
    """The model inside ComfyUI's own model base, with random weights."""
    config = Config({"image_model": "standin"})
    config.set_inference_dtype(dtype, None)
    config.unet_config = {"image_model": "standin", "dtype": dtype}
    generator = torch.Generator().manual_seed(0)
    model = QwenImage21(
        config, comfy.model_base.ModelType.FLUX, device="cpu", unet_model=model_class
    )
    for parameter in model.parameters():
        parameter.data = (0.3 * torch.randn(parameter.shape, generator=generator)).to(dtype)
        parameter.requires_grad_(False)
    return model
