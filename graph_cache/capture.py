"""What a decode step is captured from and what it becomes: static tensors, a step, a capturer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from .prefix import PrefixBuffers
from .reasons import Fallback


class StaticInputs:
    """The tensors that a step reads besides weights and K/V, and the one it writes.

    Parameters
    ----------
    tensors
        Example values by name; shapes, dtypes and devices are taken from them.
    output
        An example of the step's output.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], output: torch.Tensor) -> None:
        # Outside inference mode: tensors born inside it cannot be written outside of it later.
        with torch.inference_mode(False):
            self._tensors = {name: torch.empty_like(value) for name, value in tensors.items()}
            self.output = torch.empty_like(output)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy new values in; a value is converted to its buffer's dtype.

        Parameters
        ----------
        values
            Some or all of the named tensors, each of its buffer's shape.

        Raises
        ------
        ValueError
            If a shape differs: a copy would broadcast.
        """
        for name, value in values.items():
            buffer = self._tensors[name]
            if value.shape != buffer.shape:
                raise ValueError(f"{name}: {tuple(value.shape)} does not fit {tuple(buffer.shape)}")
            buffer.copy_(value, non_blocking=True)

    def storages(self) -> set[int]:
        """Addresses of the tensors' memory."""
        return {t.untyped_storage().data_ptr() for t in (*self._tensors.values(), self.output)}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (*self._tensors.values(), self.output))


class CapturedStep(Protocol):
    """A decode step that can be run again without Python."""

    weights: tuple
    """The weights' fingerprint that the step was captured over."""
    seconds: float
    """Time that the capture took, during which the GPU was idle."""
    nbytes: int
    """Device memory that the capture took."""

    def replay(self) -> None:
        """Run the step over the static inputs; it writes the static output."""

    def release(self) -> None:
        """Give the graph and its memory back; the step cannot be replayed afterwards."""


class Capturer(Protocol):
    """Something that makes a `CapturedStep` out of a body; tests use one without CUDA."""

    nbytes: int
    """Device memory held by the graphs that live."""

    def unavailable(self, device: torch.device) -> Fallback | None:
        """Why nothing can be captured on a device, if so."""

    def rehearse(self, body: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Fallback | None]:
        """Run a body eagerly; its result, and why it cannot be captured, if that shows."""

    def capture(
        self,
        body: Callable[[], torch.Tensor],
        inputs: StaticInputs,
        buffers: PrefixBuffers,
        weights: tuple,
    ) -> CapturedStep:
        """Capture a body that has run at least once with the same shapes, and replay it once."""


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of ``a - b`` over the norm of ``b``, in float32; NaN if either has one."""
    b = b.float()
    return ((a.float() - b).norm() / b.norm().clamp(min=torch.finfo(torch.float32).tiny)).item()


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes; unlike ``==`` this takes NaN for equal to itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        as_int = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.contiguous().view(as_int), b.contiguous().view(as_int)
    return torch.equal(a, b)
