"""Capturing one decode step as a CUDA graph, and replaying it.

The hazards that this file answers, each known from a public bug: a captured kernel reads an
address that Python has freed; something long-lived is born inside a capture; the BLAS workspace of
the capture stream is allocated during the capture; another thread's CUDA call breaks the
capture; two graphs share a pool and one replay overwrites the other's output; the memory of a
graph never comes back.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import contextmanager

import torch

from .capture import StaticInputs
from .failed_captures import clean_up, no_more
from .memory import free_bytes, is_async_allocator, trim_graph_memory
from .prefix import PrefixBuffers
from .reasons import Fallback

_SYNC_WARNING = "synchronizing CUDA operation"
"""Part of what torch warns of in its synchronisation debug mode."""


_one_at_a_time = threading.RLock()
"""The capture stream and the synchronisation debug mode belong to the process, not to a cache."""


class _Pool:
    """A graph memory pool and the device memory that went into it."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.nbytes = 0
        self.graphs: weakref.WeakSet[_CudaStep] = weakref.WeakSet()


class _CudaStep:
    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: _Pool, weights: tuple, keep: tuple
    ) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self._keep = keep
        self.weights = weights
        self.seconds = 0.0
        self.nbytes = 0
        pool.graphs.add(self)

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        if self._graph is None:
            return
        # A replay may still be running.
        torch.cuda.synchronize(self._keep[0].output.device)
        _reset(self._graph)
        device = self._keep[0].output.device
        self._graph = None
        self._keep = ()
        self._pool.graphs.discard(self)
        if is_async_allocator():
            self._pool.nbytes -= self.nbytes
            trim_graph_memory(device)


class CudaCapturer:
    """Captures CUDA graphs that share one memory pool.

    What is born in a capture dies in it, since a step's output is copied into its static
    output. So the graphs can share a pool, which then holds the intermediates of the largest of
    them. (The cudaMallocAsync allocator ignores the pool; each graph then holds its own.)
    """

    def __init__(self) -> None:
        self._pool: _Pool | None = None

    @property
    def nbytes(self) -> int:
        """Device memory held by the graphs that live."""
        pool = self._pool
        return pool.nbytes if pool is not None and len(pool.graphs) else 0

    def unavailable(self, device: torch.device) -> Fallback | None:
        """Why nothing can be captured on a device, if so."""
        if device.type != "cuda":
            return Fallback("no_cuda", str(device))
        if torch.version.hip is not None:
            return Fallback("rocm")
        if device in no_more:
            return Fallback("capture_failed", no_more[device])
        return None

    def rehearse(self, body: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Fallback | None]:
        """Run a body eagerly and watch whether it waits for the GPU.

        A wait inside a capture makes the capture fail, and under cudaMallocAsync the tensors that
        are freed on the way out then end the process. So it has to be found out before.
        """
        with _one_at_a_time:
            return self._rehearse(body)

    @staticmethod
    def _rehearse(body: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Fallback | None]:
        found: list[str] = []
        mode, thread = torch.cuda.get_sync_debug_mode(), threading.get_ident()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=f".*{_SYNC_WARNING}")
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            show = warnings.showwarning

            def watch(message, category, filename, lineno, file=None, line=None):
                if _SYNC_WARNING not in str(message):
                    show(message, category, filename, lineno, file, line)
                # Other threads may wait as they like.
                elif threading.get_ident() == thread:
                    found.append(f"{filename}:{lineno}")

            warnings.showwarning = watch
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = body()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return output, Fallback("host_sync", found[0]) if found else None

    def capture(
        self,
        body: Callable[[], torch.Tensor],
        inputs: StaticInputs,
        buffers: PrefixBuffers,
        weights: tuple,
    ) -> _CudaStep:
        """Capture ``body`` and the copy of its result into the static output, and replay it once.

        Parameters
        ----------
        body
            The decode step. It must have run before with these shapes, so that every kernel is
            loaded and every plan is made, and it must not synchronise.
        inputs
            Its static inputs; the graph writes ``inputs.output``.
        buffers
            The K/V that it reads and writes.
        weights
            Fingerprint to keep with the graph.

        Raises
        ------
        RuntimeError
            What CUDA or torch said, `torch.OutOfMemoryError` included; nothing is left behind.
        """
        device = inputs.output.device
        if device in no_more:
            raise RuntimeError(no_more[device])
        with _one_at_a_time:
            return self._capture(device, body, inputs, buffers, weights)

    def _capture(
        self,
        device: torch.device,
        body: Callable[[], torch.Tensor],
        inputs: StaticInputs,
        buffers: PrefixBuffers,
        weights: tuple,
    ) -> _CudaStep:
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.inference_mode(False), torch.no_grad():
            # BLAS workspaces belong to a stream; one allocated during the capture would live in
            # the graph's pool and outlive it.
            touch = torch.ones(16, 16, dtype=inputs.output.dtype, device=device)
            torch.mm(touch, touch)
        torch.cuda.synchronize(device)
        # From here on the GPU has nothing to do: what follows is the price of the capture.
        start = time.perf_counter()
        torch.cuda.empty_cache()
        before = free_bytes(device)
        if self._pool is None or not len(self._pool.graphs):
            self._pool = _Pool()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _no_collection(),
                # A graph whose capture fails does not leave its stream by itself.
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(
                    graph,
                    pool=self._pool.handle,
                    stream=stream,
                    # Other threads of the process may ask CUDA for free memory meanwhile.
                    capture_error_mode="thread_local",
                ),
            ):
                inputs.output.copy_(body())
        except BaseException as error:
            # An interrupt from inside the body has to leave as little behind as an error.
            clean_up(error, device, self._pool.handle, inputs.storages() | buffers.storages())
            _reset(graph)
            raise
        seconds = time.perf_counter() - start
        torch.cuda.current_stream(device).wait_stream(stream)
        try:
            # The async allocator gives a graph its memory at the first launch.
            graph.replay()
            torch.cuda.synchronize(device)
        except BaseException:
            _reset(graph)
            raise
        # Not the body: what its kernels read besides is the weights, whose addresses are compared
        # before every replay, and it may hold much that is somebody else's.
        step = _CudaStep(graph, self._pool, weights, (inputs, buffers))
        step.nbytes = max(0, before - free_bytes(device))
        step.seconds = seconds
        self._pool.nbytes += step.nbytes
        return step


_capture_streams: dict[torch.device, torch.cuda.Stream] = {}


def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The process's stream for captures: each stream has BLAS workspaces that are never freed."""
    if device not in _capture_streams:
        _capture_streams[device] = torch.cuda.Stream(device)
    return _capture_streams[device]


def _reset(graph: torch.cuda.CUDAGraph) -> None:
    """Give a graph back."""
    with warnings.catch_warnings():
        # The async allocator warns of frees that were not captured; they are ours, and meant.
        warnings.simplefilter("ignore")
        graph.reset()


@contextmanager
def _no_collection():
    """No cyclic garbage collection: it could free somebody's CUDA memory during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StreamOrder:
    """Keeps steps that share static memory in order, whichever streams their callers use."""

    def __init__(self) -> None:
        self._last: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}

    @contextmanager
    def step(self, device: torch.device | None):
        """Run one step: wait for the last one if it was enqueued on another stream.

        Without a device, or with one that has no streams, there is nothing to order.
        """
        if device is None or device.type != "cuda":
            yield
            return
        stream = torch.cuda.current_stream(device)
        last, event = self._last.get(device, (stream, None))
        if event is None:
            event = torch.cuda.Event()
        elif last != stream:
            stream.wait_event(event)
        try:
            yield
        finally:
            self._last[device] = (stream, event)
            event.record(stream)
