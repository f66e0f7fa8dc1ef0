"""A training by the clock, and what a stopped one goes on from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from .captured import Captured, Update


class Clock:
    """Training by time: how much of it is over, the learning rate at it, a progress bar.

    Parameters
    ----------
    minutes
        In all.
    cool
        Last share of the time, in which the rates go to 0; in the first `WARM_UP` steps they rise.
    """

    WARM_UP = 150

    def __init__(self, minutes: float, cool: float) -> None:
        if minutes <= 0:
            raise SystemExit("error: making the samples took all of --minutes; give more of them")
        self.seconds, self.cool = minutes * 60, cool
        self.began = time.perf_counter()
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.bar = tqdm(total=100, unit="%", mininterval=5)
        self._loss = None

    def __iter__(self) -> Iterator[int]:
        while self.over < 1:
            yield self.step
            self.step += 1
        self.bar.close()

    @property
    def over(self) -> float:
        """Share of the time that is over, 0 to 1 and more."""
        return (time.perf_counter() - self.began) / self.seconds

    def set(self, update: Update) -> None:
        """Set an update's share of its full rates, and its average, for this step."""
        scale = min(1, (self.step + 1) / self.WARM_UP)
        scale *= min(1, max(0.0, 1 - self.over) / self.cool)
        update.scale.fill_(scale)
        update.keep.fill_(min(0.998, (self.step + 1) / (self.step + 10)))

    def note(self, loss: torch.Tensor) -> None:
        """Note a loss; it is read from the GPU every 50 steps."""
        loss = loss.detach()
        if self._loss is None:
            self._loss = loss.clone()
        self._loss.lerp_(loss, 0.05)
        if self.step % 50 == 0:
            self.losses.append((self.step, self._loss.item()))
            if not math.isfinite(self.losses[-1][1]):
                raise SystemExit("error: the loss is no number any more; try a lower --rate")
            self.bar.n = min(100, round(100 * self.over, 1))
            self.bar.set_postfix(step=self.step, loss=f"{self.losses[-1][1]:.4f}")

    def report(self, folder: Path, name: str) -> None:
        """Write the losses."""
        (folder / f"{name}_losses.json").write_text(json.dumps(self.losses) + "\n")


def captured_update(update: Update) -> Captured:
    """An update as a CUDA graph, where that can be; its warm-up leaves the weights as they are."""
    step = Captured(update)
    if update.scale.device.type == "cuda":
        update.scale.zero_()
        try:
            step.capture()
        except RuntimeError as error:
            no_graph("update", error)
    return step


def no_graph(what: str, error: RuntimeError) -> None:
    """Say that something runs eagerly, and why."""
    print(f"no CUDA graph of the {what}: {error}", flush=True)
    torch.cuda.synchronize()


def read_state(run: Path, weights: dict[str, torch.Tensor]) -> None:
    """Set weights to what `write_state` wrote."""
    found = [load_file(path) for path in sorted(run.glob("state*.safetensors"))]
    if not found:
        raise SystemExit(f"error: {run} holds no state to resume from")
    for part in found:
        for name, value in part.items():
            weights[name].data.copy_(value)


def write_state(run: Path, weights: dict[str, torch.Tensor], most: int = 14 << 20) -> None:
    """Write float32 weights to go on from, in files of at most 14 MiB."""
    for old in run.glob("state*.safetensors"):
        old.unlink()
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, value in weights.items():
        if sum(part.nbytes for part in parts[-1].values()) + value.nbytes > most:
            parts.append({})
        parts[-1][name] = value.detach().cpu().contiguous()
    for number, part in enumerate(parts):
        save_file(part, run / f"state{number}.safetensors")
