"""The calls that `QwenImage21Pipeline` makes of its transformer, on random latents and prompts.

For the benchmark and the tests: every layout, batch and number of conditionings, without the text
encoder and the VAE.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from .layout import SequenceLayout, grid_tokens


@dataclass
class Case:
    """What is generated.

    Attributes
    ----------
    size
        Side of the square target in pixels.
    references
        Number of 1024 x 1024 reference images.
    batch
        Rows.
    conditionings
        1, or 2 for classifier-free guidance.
    text
        Text tokens of the prompt; a negative prompt has a third of them.
    """

    size: int
    references: int = 0
    batch: int = 1
    conditionings: int = 1
    text: int = 100

    @property
    def name(self) -> str:
        """For tables: ``1024 px, 1 ref, cfg``."""
        parts = [f"{self.size} px"]
        if self.references:
            parts.append(f"{self.references} ref")
        if self.batch > 1:
            parts.append(f"batch {self.batch}")
        if self.conditionings > 1:
            parts.append("cfg")
        return ", ".join(parts)

    def layouts(self) -> list[SequenceLayout]:
        """One a conditioning: five text tokens before each reference, the prompt at the end."""
        side = self.size // 16
        return [
            SequenceLayout(
                (*([5] * self.references), text),
                ((1, 64, 64),) * self.references,
                (1, side, side),
            )
            for text in (self.text, max(self.text // 3, 1))[: self.conditionings]
        ]


class Call(NamedTuple):
    """One call of the denoiser: its step, host seconds, and events around its GPU work."""

    step: int
    host: float
    events: list[torch.cuda.Event] | None


@dataclass
class Timings:
    """What one `Workload.run` gave.

    Attributes
    ----------
    outputs
        Predictions of the target, ``(batch, target, channels)``; all conditionings of the first
        step, then of the second, and so on.
    calls
        In the same order.
    first, rest
        Seconds of the first step, and of all others.
    """

    outputs: list[torch.Tensor]
    calls: list[Call]
    first: float
    rest: float

    @property
    def decode_calls(self) -> list[Call]:
        """All calls after the first step."""
        return [call for call in self.calls if call.step > 0]

    def host_ms(self) -> float:
        """Median time until a decode call returned to Python."""
        return statistics.median(call.host for call in self.decode_calls) * 1e3

    def wall_ms(self) -> float:
        """Time of the decode loop over its calls."""
        return self.rest / len(self.decode_calls) * 1e3

    def gpu_ms(self) -> float | None:
        """Median time of a decode call between events on the stream; None without a GPU."""
        times = [
            call.events[0].elapsed_time(call.events[1])
            for call in self.decode_calls
            if call.events is not None
        ]
        return statistics.median(times) if times else None


class Workload:
    """A denoising loop.

    Parameters
    ----------
    model
        The transformer.
    layouts
        One a conditioning, all with the same references and target: a second one makes it
        classifier-free guidance.
    batch
        Rows.
    seed
        Of latents, references and prompts.
    """

    def __init__(
        self,
        model: QwenImage21Transformer2DModel,
        layouts: Sequence[SequenceLayout],
        *,
        batch: int = 1,
        seed: int = 0,
    ) -> None:
        self.model, self.layouts, self.batch = model, tuple(layouts), batch
        weight = model.img_in.weight
        self.device, self.dtype = weight.device, weight.dtype
        generator = torch.Generator(self.device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator, device=self.device)
            return made.to(self.dtype)

        first = self.layouts[0]
        channels, width = model.config.in_channels, model.config.context_in_dim
        self.grids = [*first.references, first.target]
        # Transposed, as the pipeline packs them.
        self.latents = normal(batch, channels, first.target_tokens).transpose(1, 2)
        self.references = normal(batch, first.reference_tokens, channels)
        self.masks, self.prompts = [], []
        for layout in self.layouts:
            slots: list[bool] = []
            for run, grid in zip(layout.text_runs, self.grids):
                slots += [False] * run + [True] * (grid_tokens(grid) // 4)
            self.masks.append(torch.tensor([slots], device=self.device))
            # The vision-language sequence ends before the target.
            length = len(slots) - layout.target_tokens // 4
            self.prompts.append(normal(batch, length, width))

    def arguments(self, index: int, latents: torch.Tensor, sigma: float) -> dict:
        """The transformer's arguments for one call, without its K/V cache.

        Parameters
        ----------
        index
            Of the conditioning.
        latents
            ``(batch, target, channels)``.
        sigma
            Noise level in (0, 1].
        """
        hidden = latents
        if self.references.shape[1]:
            hidden = torch.cat([self.references, latents], dim=1)
        return {
            "hidden_states": hidden,
            "encoder_hidden_states": self.prompts[index],
            "timestep": torch.full((self.batch,), sigma, device=self.device, dtype=self.dtype),
            "img_shapes": [self.grids] * self.batch,
            "img_mask": self.masks[index],
            "return_dict": False,
        }

    def kv_caches(self) -> list[QwenImage21KVCache]:
        """A new K/V cache for each conditioning."""
        return [QwenImage21KVCache(len(self.model.transformer_blocks)) for _ in self.layouts]

    def run(self, steps: int, *, cached: bool = True, drain: bool = False) -> Timings:
        """Denoise once and time every call.

        Parameters
        ----------
        steps
            Number of steps.
        cached
            Use diffusers' K/V cache, as the pipeline does by default.
        drain
            Wait for the GPU before every call. Then a call's host time is what it takes to issue
            it; otherwise a busy GPU's full queue is part of it.
        """
        gpu = self.device.type == "cuda"
        caches = self.kv_caches() if cached else [None] * len(self.layouts)
        latents = self.latents.clone()
        timings = Timings([], [], 0.0, 0.0)
        self._synchronize()
        start = time.perf_counter()
        for step in range(steps):
            mode = ("extract" if step == 0 else "cached") if cached else None
            predictions = []
            for index, kv_cache in enumerate(caches):
                arguments = self.arguments(index, latents, 1 - step / steps)
                if drain and gpu:
                    # Not a blocking wait, from which the host would have to wake up first.
                    while not torch.cuda.current_stream(self.device).query():
                        pass
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else None
                if events:
                    events[0].record()
                before = time.perf_counter()
                output = self.model(**arguments, kv_cache=kv_cache, kv_cache_mode=mode)[0]
                host = time.perf_counter() - before
                if events:
                    events[1].record()
                predictions.append(output[:, -latents.shape[1] :])
                timings.calls.append(Call(step, host, events))
            timings.outputs += predictions
            guided = predictions[0]
            if len(predictions) > 1:
                guided = predictions[1] + 2 * (predictions[0] - predictions[1])
            # Keeps the latents' memory layout, as the scheduler does.
            latents = latents - guided / steps
            if step == 0:
                self._synchronize()
                timings.first = time.perf_counter() - start
        self._synchronize()
        timings.rest = time.perf_counter() - start - timings.first
        return timings

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
