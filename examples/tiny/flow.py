"""The transformer's loss: flow matching on batches of one layout, at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .captured import Captured
from .joint import Joint, Layout
from .models import CHANNELS, TOKENS, shifted


class Batch:
    """Fixed-address inputs of one layout.

    Attributes
    ----------
    ids
        Token ids ``(size, sum(layout.runs))``.
    references, target, noise
        Latents ``(size, references, TOKENS, CHANNELS)``; ``(size, TOKENS, CHANNELS)`` twice.
    sigma
        ``(size,)``.
    """

    def __init__(self, layout: Layout, size: int, device: torch.device) -> None:
        self.ids = torch.zeros(size, sum(layout.runs), dtype=torch.long, device=device)
        self.references = torch.zeros(size, layout.references, TOKENS, CHANNELS, device=device)
        self.target = torch.zeros(size, TOKENS, CHANNELS, device=device)
        self.noise = torch.zeros_like(self.target)
        self.sigma = torch.zeros(size, device=device)

    def load(self, ids: torch.Tensor, references: torch.Tensor, target: torch.Tensor) -> None:
        """Copy samples in and draw noise and levels for them."""
        self.ids.copy_(ids)
        self.references.copy_(references)
        self.target.copy_(target)
        self.noise.normal_()
        # Most levels as the sampler takes them: a whole grid of latents shows what it holds
        # through a lot of noise, so that is where a picture's content is decided.
        even = torch.rand_like(self.sigma)
        pick = torch.rand_like(self.sigma) < 0.8
        self.sigma.copy_(torch.where(pick, shifted(even), even).clamp(0.002, 1))


class Losses:
    """Computes a layout's loss and adds its gradients to those of the weights.

    Parameters
    ----------
    joint
        The transformer.
    embedding
        ``(words, context)``.
    clear
        Sets the gradients to zero in place.
    """

    def __init__(self, joint: Joint, embedding: torch.Tensor, clear: Callable[[], None]) -> None:
        self._joint, self._embedding, self._clear = joint, embedding, clear
        self._steps: dict[Layout, Captured] = {}
        self._batches: dict[Layout, Batch] = {}

    def batch(self, layout: Layout, size: int) -> Batch:
        """The inputs of a layout."""
        if layout not in self._batches:
            self._batches[layout] = Batch(layout, size, self._joint.device)
            self._steps[layout] = Captured(lambda: self._eager(layout))
        return self._batches[layout]

    def __call__(self, layout: Layout) -> torch.Tensor:
        """Loss of a layout's loaded batch; the gradients are this batch's alone."""
        return self._steps[layout]()

    def _eager(self, layout: Layout) -> torch.Tensor:
        self._clear()
        batch, device = self._batches[layout], self._joint.device
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            # A product instead of a look-up, whose gradient may wait for the GPU.
            numbers = torch.arange(len(self._embedding), device=device)
            chosen = (batch.ids[..., None] == numbers).to(self._embedding.dtype)
            text = chosen @ self._embedding
            noisy = torch.lerp(batch.target, batch.noise, batch.sigma[:, None, None])
            velocity = self._joint(layout, text, batch.references, noisy, batch.sigma)
        loss = F.mse_loss(velocity.float(), batch.noise - batch.target)
        loss.backward()
        return loss.detach()

    def capture(self) -> None:
        """Capture every layout whose batch is loaded; the graphs share one memory pool.

        Raises
        ------
        RuntimeError
            What CUDA said, or that a replay's loss is not the eager one's.
        """
        pool = torch.cuda.graph_pool_handle()
        for layout, step in self._steps.items():
            expected = self._eager(layout).item()
            step.capture(pool, warm_ups=1)
            found = step().item()
            # Sums in another order differ a little.
            if not abs(found - expected) <= 1e-2 * expected:
                raise RuntimeError(f"a replay's loss is {found:.4f}, not {expected:.4f}")

    def release(self) -> None:
        """Give graphs and batches up, for ones of another size."""
        self._steps.clear()
        self._batches.clear()
