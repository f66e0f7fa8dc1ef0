"""What the manager asks of an adapter, and how an adapter describes a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from ..capture import StaticInputs
from ..entries import Entry
from ..layout import SequenceLayout
from ..prefix import PrefixBuffers, PrefixShape
from ..reasons import Fallback


class Phase(Enum):
    """What a model call is, before anything is decided."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNCACHED = "uncached"


@dataclass
class ModelCall:
    """One call of the model, in the manager's terms.

    Attributes
    ----------
    phase
        What kind of call it is.
    conditioning
        Identifies the conditioning: an object that lives as long as its run needs it, can be
        weakly referenced and is compared by identity. None where there is none.
    device, dtype, batch, strides
        Of the call's hidden states.
    arguments
        The call's arguments by name; only its adapter reads them.
    run_native
        Runs the unpatched model, with some arguments replaced if they are given.
    """

    phase: Phase
    conditioning: object | None
    device: torch.device
    dtype: torch.dtype
    batch: int
    strides: tuple[int, ...]
    arguments: Mapping[str, Any]
    run_native: Callable[..., Any]


class Adapter(Protocol):
    """All knowledge of one model class; stateless between runs."""

    name: str
    """Short name of the door, for reports."""

    def attach(self, handle: Callable[[ModelCall], Any]) -> None:
        """Route the model's calls to ``handle``."""

    def detach(self) -> None:
        """Leave the model exactly as it was found."""

    def fallbacks(self, call: ModelCall | None) -> Iterable[Fallback]:
        """What about model and libraries stands against the cache; asked once a run.

        Without a call, whatever can be said before the first one.
        """

    def call_fallback(self, call: ModelCall) -> Fallback | None:
        """What about this one call stands against the cache; asked at every call."""

    def attention(self, call: ModelCall) -> str:
        """Name of the attention function that a decode step of a call would use now."""

    def layout(self, call: ModelCall) -> SequenceLayout | Fallback:
        """The sequence of a prefill call, or why it is not one we know."""

    def prefix_shape(self, call: ModelCall, layout: SequenceLayout) -> PrefixShape:
        """Sizes of the buffers that a prefill call needs."""

    def prepare_fast(self, call: ModelCall) -> Fallback | None:
        """Make the model ready for the fast profile, or say why it has to be the exact one.

        Asked at every prefill of a run in that profile.
        """

    def kernels(self) -> dict[str, str]:
        """What runs each operation of a fast step, once `prepare_fast` has made it ready."""

    def static_inputs(self, call: ModelCall, layout: SequenceLayout) -> StaticInputs:
        """New static inputs of the decode step."""

    def run_values(self, call: ModelCall, layout: SequenceLayout) -> Mapping[str, torch.Tensor]:
        """The static inputs that change once a run."""

    def step_values(self, call: ModelCall, layout: SequenceLayout) -> Mapping[str, torch.Tensor]:
        """The static inputs that change at every step."""

    def prefill(self, call: ModelCall, buffers: PrefixBuffers) -> tuple[Any, Fallback | None]:
        """Run the model's own prefill, its prefix K/V going into the buffers.

        Afterwards the model's own path can still decode from the call's conditioning. Beside the
        model's result stands why the buffers could not be filled, if they could not.
        """

    def settle(self) -> None:
        """Let go of the prefixes that the model itself keeps; our decode steps read ours now."""

    def reference(self, call: ModelCall) -> torch.Tensor | None:
        """What the model's own cached step gives; None where it would not use its cache."""

    def decode_fallback(self, call: ModelCall, entry: Entry) -> Fallback | None:
        """Why a decode call does not fit the entry of its conditioning, if it does not."""

    def body(self, call: ModelCall, entry: Entry) -> Callable[[], torch.Tensor]:
        """One decode step over an entry's static tensors alone: no host sync, safe to capture.

        In the profile of the entry's key.
        A graph keeps it, so it holds nothing of the call that is large or changes.
        """

    def resident(self) -> AbstractContextManager[Fallback | None]:
        """Keep all weights where they are on the device, or say why they are not there."""

    def wrap(self, call: ModelCall, output: torch.Tensor) -> Any:
        """A decode step's output in the form that the caller of the model expects."""

    def part(self, conditioning: object) -> None:
        """Let a conditioning hold its prefix alone, as without us, and nothing of our buffers."""

    def refresh_weights(self) -> None:
        """Look up all modules and weights anew; called at every prefill."""

    def weight_fallback(self, call: ModelCall) -> Fallback | None:
        """What about the weights speaks against a capture now; asked before one."""

    def weights(self) -> tuple:
        """Fingerprint of modules and weights: identities, addresses. Called before every replay."""

    def recover(self) -> None:
        """Clean up after an error in our path, before the model's own path runs."""

    def pending_bytes(self) -> int:
        """Device memory that the model's own weights are still going to take."""

    def make_room(self, nbytes: int, device: torch.device) -> None:
        """Ask whoever else can give device memory back to leave so many bytes free."""
