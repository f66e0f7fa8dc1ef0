"""Training of the VAE."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21
from safetensors.torch import load_file, save_file

from .captured import Captured, Update
from .evaluation import decode, encode, sheet
from .models import CHANNELS, make_vae
from .rendering import Renderer
from .samples import as_pixels, draws
from .training import Clock, captured_update, no_graph


def train_vae(args: argparse.Namespace) -> None:
    """Train the VAE on pictures of the generated world, and write it."""
    device = torch.device(args.device)
    vae = make_vae().to(device)
    state = args.run / "vae.safetensors"
    if args.resume:
        vae.load_state_dict(load_file(state, device=str(device)))
    made = draws(10**9, args.pictures, 0.3, args.workers)
    scenes = torch.cat([part for _, _, part in made])[: args.pictures]
    render = Renderer(device)
    batch = args.batch or (64 if device.type == "cuda" else 8)
    weights = dict(vae.named_parameters())
    update = Update(weights, (), args.rate, args.rate)
    pixels = _cropped(as_pixels(render(scenes[:batch])), args.crop)
    step = Captured(lambda: _loss(vae, update, pixels))
    if device.type == "cuda":
        try:
            step.capture()
        except RuntimeError as error:
            no_graph("VAE's step", error)
    apply = captured_update(update)
    clock = Clock(args.minutes, args.cool)
    for _ in clock:
        clock.set(update)
        drawn = as_pixels(render(scenes[torch.randint(len(scenes), (batch,))]))
        pixels.copy_(_cropped(drawn, args.crop))
        clock.note(step())
        apply()
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(update.average[name])
    args.run.mkdir(parents=True, exist_ok=True)
    clock.report(args.run, "vae")
    vae.eval()
    _measure_latents(vae, render(scenes[:2048]))
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, state)
    statistics = {key: vae.config[key] for key in ("latents_mean", "latents_std")}
    (args.run / "vae.json").write_text(json.dumps(statistics) + "\n")
    shown = render(scenes[:12])
    again = decode(vae, encode(vae, as_pixels(shown)))
    error = (torch.from_numpy(again).float() - shown.cpu().float()).square().mean().item()
    print(f"VAE after {clock.step} steps: PSNR {10 * math.log10(255**2 / error):.1f} dB")
    deviation = torch.tensor(vae.config.latents_std)
    used = int((deviation > deviation.min()).sum())
    print(f"deviations of latents: up to {deviation.max():.3f}; {used} channels of {CHANNELS} used")
    sheet(
        [("drawn", list(shown.cpu().numpy())), ("through the VAE", list(again))],
        args.run / "vae.png",
    )


def _cropped(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """A square part of pictures ``(..., height, width)``, at a random place."""
    y, x = (int(torch.randint(whole - side + 1, ())) for whole in pixels.shape[-2:])
    return pixels[..., y : y + side, x : x + side]


def _loss(vae: AutoencoderKLQwenImage21, update: Update, pixels: torch.Tensor) -> torch.Tensor:
    """Reconstruction and divergence of a batch; leaves its gradients."""
    update.clear()
    with torch.autocast(pixels.device.type, torch.bfloat16, cache_enabled=False):
        posterior = vae.encode(pixels).latent_dist
        mean, variance = posterior.mean.float(), posterior.var.float()
        latents = mean + variance.sqrt() * torch.randn_like(mean)
        seen = vae.decode(latents).sample.float()
    error = (seen - pixels).abs()
    # Under alpha 0 the colour does not show, so it matters less; but it does a little: the
    # references that the model sees have one there, too.
    shows = torch.where(pixels[:, 3:] < -0.9, 0.2, 1.0)
    weight = torch.cat([shows.expand(-1, 3, -1, -1, -1), torch.ones_like(shows)], dim=1)
    divergence = 0.5 * (mean.square() + variance - 1 - variance.log()).mean()
    loss = (error * weight).mean() + 0.5 * (error.square() * weight).mean()
    loss = loss + 2e-4 * divergence
    loss.backward()
    return loss.detach()


def _measure_latents(vae: AutoencoderKLQwenImage21, pictures: torch.Tensor) -> None:
    """Put mean and deviation of the latents into the VAE's configuration.

    A channel that the VAE does not use has next to no deviation; dividing by it would make the
    transformer learn its rounding. So none is taken for less than a third of the largest: the
    divergence keeps that near 1, and the decoder has learned to bear more noise in the others.
    """
    found = torch.cat([encode(vae, as_pixels(part)) for part in pictures.split(64)]).flatten(0, 1)
    deviation = found.std(0)
    deviation = deviation.clamp(min=deviation.max() / 3)
    vae.register_to_config(latents_mean=found.mean(0).tolist(), latents_std=deviation.tolist())


def load_vae(run: Path, device: torch.device) -> AutoencoderKLQwenImage21:
    """The VAE that `train_vae` wrote."""
    vae = make_vae()
    vae.load_state_dict(load_file(run / "vae.safetensors"))
    vae.register_to_config(**json.loads((run / "vae.json").read_text()))
    return vae.to(device).eval().requires_grad_(False)
