"""Loss and gradients of a batch, eagerly or as a CUDA graph a layout.

The model is so small that launching its kernels takes longer than running them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .joint import Joint, Layout
from .models import CHANNELS, TOKENS


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
        # Half of the levels evenly, half around the middle, where a picture's content is decided.
        middle = torch.sigmoid(torch.randn_like(self.sigma))
        even = torch.rand_like(self.sigma)
        pick = torch.rand_like(self.sigma) < 0.5
        self.sigma.copy_(torch.where(pick, middle, even).clamp(0.002, 1))


class Gradients:
    """Computes losses, and leaves gradients in ``.grad`` of the weights.

    Parameters
    ----------
    joint
        The transformer.
    embedding
        ``(words, context)``.
    weights
        All that is trained, the embedding included.
    """

    def __init__(
        self, joint: Joint, embedding: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> None:
        self._joint, self._embedding, self._weights = joint, embedding, list(weights)
        self._graphs: dict[Layout, tuple[torch.cuda.CUDAGraph, torch.Tensor, list]] = {}
        self._batches: dict[Layout, Batch] = {}

    def batch(self, layout: Layout, size: int) -> Batch:
        """The inputs of a layout."""
        if layout not in self._batches:
            self._batches[layout] = Batch(layout, size, self._joint.device)
        return self._batches[layout]

    def __call__(self, layout: Layout) -> torch.Tensor:
        """Loss of a layout's loaded batch; the gradients are this batch's alone."""
        if layout in self._graphs:
            graph, loss, found = self._graphs[layout]
            graph.replay()
            for weight, gradient in zip(self._weights, found):
                weight.grad = gradient
            return loss
        return self._eager(layout)

    def _eager(self, layout: Layout) -> torch.Tensor:
        for weight in self._weights:
            weight.grad = None
        batch, device = self._batches[layout], self._joint.device
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            # A product instead of a look-up, whose gradient may wait for the GPU.
            numbers = torch.arange(len(self._embedding), device=device)
            chosen = (batch.ids[..., None] == numbers).to(self._embedding.dtype)
            text = chosen @ self._embedding
            noisy = torch.lerp(batch.target, batch.noise, batch.sigma[:, None, None])
            velocity = self._joint(layout, text, batch.references, noisy, batch.sigma)
        loss = F.mse_loss(velocity.float(), batch.noise - batch.target)
        loss.backward()
        return loss.detach()

    def capture(self, layouts: Sequence[Layout]) -> None:
        """Capture layouts whose batches are loaded; their graphs share one memory pool.

        Raises
        ------
        RuntimeError
            What CUDA said, or that a replay's gradients are not the eager ones'.
        """
        stream = torch.cuda.Stream()
        pool = torch.cuda.graph_pool_handle()
        for layout in layouts:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    expected = self._eager(layout)
                wanted = [weight.grad.clone() for weight in self._weights]
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            for weight in self._weights:
                weight.grad = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                loss = self._eager(layout)
            found = [weight.grad for weight in self._weights]
            graph.replay()
            torch.cuda.synchronize()
            off = sum((a - b).square().sum() for a, b in zip(found, wanted)) ** 0.5
            size = sum(a.square().sum() for a in wanted) ** 0.5
            # Sums in another order differ a little.
            if not (off <= 0.02 * size and (loss - expected).abs() <= 1e-2 * expected):
                self._graphs.clear()
                raise RuntimeError(f"replay is off by {float(off):.3g} of {float(size):.3g}")
            self._graphs[layout] = graph, loss, found

    def release(self) -> None:
        """Give the graphs up."""
        self._graphs.clear()

    def forget(self) -> None:
        """Give the batches up, for ones of another size."""
        self._batches.clear()
