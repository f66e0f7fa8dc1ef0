"""A training step as CUDA graphs: the models are so small that launching takes longer than running.

Everything here works on fixed tensors and reads nothing back, so that a graph can replay it. Where
there is no GPU, or a capture fails, the same functions run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.optim import AdamW, Muon


class Captured:
    """A function of no arguments, replayed as a CUDA graph once it was captured.

    Parameters
    ----------
    function
        Works on tensors at fixed addresses and returns one.
    """

    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: torch.Tensor | None = None

    def capture(self, pool: tuple[int, int] | None = None, warm_ups: int = 2) -> None:
        """Capture what the function launches; it runs ``warm_ups`` times before.

        Raises
        ------
        RuntimeError
            What CUDA said.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                self._function()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            self._result = self._function()
        self._graph = graph

    def __call__(self) -> torch.Tensor:
        """Run or replay the function."""
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._result

    def release(self) -> None:
        """Give the graph up; the function runs eagerly from here on."""
        self._graph = self._result = None


class Update:
    """One step of the optimizers on gradients that lie ready, and a running average of the weights.

    Matrices of the blocks are Muon's, the rest AdamW's. The rate of a step scales what the
    optimizers change at their full rates: a graph holds those as constants.

    Parameters
    ----------
    weights
        By name; gets gradients at fixed addresses.
    matrices
        Names of the matrices for Muon.
    rate
        Full learning rate of AdamW.
    muon_rate
        Full learning rate of Muon.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        matrices: Iterable[str],
        rate: float,
        muon_rate: float,
    ) -> None:
        chosen = set(matrices)
        self._weights = list(weights.values())
        for weight in self._weights:
            weight.grad = torch.zeros_like(weight)
        device = self._weights[0].device
        on_gpu = device.type == "cuda"
        rest = [weight for name, weight in weights.items() if name not in chosen]
        self._optimizers: list[torch.optim.Optimizer] = [
            AdamW(
                [
                    {"params": [w for w in rest if w.ndim > 1], "weight_decay": 0.02},
                    {"params": [w for w in rest if w.ndim <= 1], "weight_decay": 0.0},
                ],
                lr=rate,
                betas=(0.9, 0.97),
                capturable=on_gpu,
                foreach=True,
            )
        ]
        if chosen:
            self._optimizers.append(
                Muon(
                    [weights[name] for name in sorted(chosen)],
                    lr=muon_rate,
                    weight_decay=0.02,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        self._before = [torch.empty_like(weight) for weight in self._weights]
        self.average = {name: weight.detach().clone() for name, weight in weights.items()}
        self._averages = list(self.average.values())
        self.scale = torch.zeros((), device=device)
        """Share of the full rates of this step, 0 to 1."""
        self.keep = torch.zeros((), device=device)
        """What the average keeps of itself, 0 to 1."""

    def clear(self) -> None:
        """Set the gradients to zero in place."""
        torch._foreach_zero_([weight.grad for weight in self._weights])

    def __call__(self) -> torch.Tensor:
        """Clip, step and average; returns the norm of the gradients."""
        norm = torch.nn.utils.clip_grad_norm_(self._weights, 1.0, foreach=True)
        weights = [weight.detach() for weight in self._weights]
        with torch.no_grad():
            torch._foreach_copy_(self._before, weights)
        for optimizer in self._optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_sub_(weights, self._before)
            torch._foreach_mul_(weights, self.scale)
            torch._foreach_add_(weights, self._before)
            torch._foreach_sub_(self._averages, weights)
            torch._foreach_mul_(self._averages, self.keep)
            torch._foreach_add_(self._averages, weights)
        return norm
