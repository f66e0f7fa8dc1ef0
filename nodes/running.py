"""The caches behind the nodes on the canvas, by node id."""

from __future__ import annotations

import weakref
from typing import Any

from ..graph_cache import Fallback
from ..graph_cache.models.comfyui import Options, Runtime, patch
from .status import Publisher, reports

_runtimes: weakref.WeakValueDictionary[str, Runtime] = weakref.WeakValueDictionary()
"""Weak: a cache lives as long as the MODEL that it is in front of."""


def patched_for(
    node_id: str | None, model: Any, options: Options
) -> tuple[Any, Runtime | Fallback]:
    """A MODEL patched for a node, which shows its runs; see `graph_cache.models.comfyui.patch`."""
    publisher = Publisher(node_id)
    patched, found = patch(model, options, publisher.finished, publisher.live)
    if isinstance(found, Fallback):
        publisher.left_alone(found)
    elif node_id is not None:
        _runtimes[node_id] = found
    return patched, found


def status() -> list[dict]:
    """What every node's cache holds, and its last report."""
    # Copies: a run may be adding to them in its own thread.
    runtimes, last = dict(_runtimes.items()), dict(reports)
    found = []
    for node_id in sorted({*runtimes, *last}):
        runtime = runtimes.get(node_id)
        workflow, report = last.get(node_id, (None, None))
        found.append(
            {
                "node": node_id,
                "workflow": workflow,
                "entries": 0 if runtime is None else runtime.held_entries,
                "held_bytes": 0 if runtime is None else runtime.held_bytes,
                "report": report,
            }
        )
    return found


def release(node_id: str | None = None) -> list[str]:
    """Give the buffers and graphs of one node, or of all, back.

    Returns
    -------
    list of str
        Ids of the nodes that held a cache.

    Raises
    ------
    KeyError
        If there is no cache of that node.
    """
    if node_id is not None and node_id not in _runtimes:
        raise KeyError(node_id)
    chosen = sorted(_runtimes) if node_id is None else [node_id]
    for chosen_id in chosen:
        runtime = _runtimes.get(chosen_id)
        if runtime is not None:
            runtime.release()
    return chosen
