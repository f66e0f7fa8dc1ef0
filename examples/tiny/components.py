"""Connected parts of a binary picture, in numpy and plain Python."""

from __future__ import annotations

import numpy as np


def components(binary: np.ndarray) -> list[np.ndarray]:
    """Find the connected parts (by edges, not by corners) of a picture.

    Parameters
    ----------
    binary
        bool (height, width).

    Returns
    -------
    list of numpy.ndarray
        For each part the flat indices of its pixels, ascending, int64.
    """
    height, width = binary.shape
    # A column of False at the end keeps a run from going over to the next row.
    padded = np.zeros((height, width + 1), np.int8)
    padded[:, :width] = binary
    change = np.flatnonzero(np.diff(padded.ravel(), prepend=np.int8(0)))
    starts, ends = change[::2].tolist(), change[1::2].tolist()
    parents = _joined(starts, ends, width + 1)
    parts: dict[int, list[np.ndarray]] = {}
    for run, (start, end) in enumerate(zip(starts, ends)):
        row = start // (width + 1)
        parts.setdefault(_root(parents, run), []).append(np.arange(start - row, end - row))
    return [np.concatenate(runs) for runs in parts.values()]


def _joined(starts: list[int], ends: list[int], stride: int) -> list[int]:
    """Union-find parents of the runs, those that touch in two rows joined."""
    parents = list(range(len(starts)))
    above = 0
    for run, (start, end) in enumerate(zip(starts, ends)):
        low, high = start - stride, end - stride
        while ends[above] <= low:
            above += 1
        other = above
        while other < run and starts[other] < high:
            parents[_root(parents, other)] = _root(parents, run)
            other += 1
    return parents


def _root(parents: list[int], run: int) -> int:
    while parents[run] != run:
        parents[run] = parents[parents[run]]
        run = parents[run]
    return run
