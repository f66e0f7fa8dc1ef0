"""Which background lies behind the items of a picture."""

from __future__ import annotations

from functools import cache

import numpy as np

from .scenes import PATTERNS, TINTS, Background, second_tone

_LEAST_CONTRAST = 13
"""Difference of a pattern's two tones, of 255, mean of the channels; drawn ones have 33 to 40."""
_LEAST_CORRELATION = 0.5


def look_behind(rgb: np.ndarray, is_object: np.ndarray) -> tuple[Background | None, np.ndarray]:
    """Find the nearest tint and the pattern, by what is clear of the items.

    Parameters
    ----------
    rgb
        Half the resolution, float32 (128, 128, 3) of 0..255.
    is_object
        Where items are, bool (128, 128).

    Returns
    -------
    tuple
        The background, None where too little of it is clear; and the picture without its items,
        in the tones that were seen, like `rgb`.
    """
    clear = ~grown(grown(is_object))
    if np.count_nonzero(clear) < clear.size // 20:
        return None, np.full_like(rgb, 255)
    pixels = rgb[clear]
    pattern = _pattern(pixels.mean(1), clear)
    if pattern == "plain":
        tones = np.median(pixels, axis=0)[None]
    else:
        second = _share(pattern)[clear] > 0.5
        tones = np.array([np.median(pixels[~second], axis=0), np.median(pixels[second], axis=0)])
    share = _share(pattern)[..., None]
    behind = tones[0] + share * (tones[-1] - tones[0])
    return Background(_tint(tones), pattern), behind


def grown(binary: np.ndarray) -> np.ndarray:
    """Add the four neighbours of each True."""
    wider = binary.copy()
    wider[1:] |= binary[:-1]
    wider[:-1] |= binary[1:]
    wider[:, 1:] |= binary[:, :-1]
    wider[:, :-1] |= binary[:, 1:]
    return wider


def _pattern(grey: np.ndarray, clear: np.ndarray) -> str:
    """The pattern that the clear pixels' (n,) brightness goes with best, if well enough."""
    grey = grey - grey.mean()
    best, found = _LEAST_CORRELATION, "plain"
    for pattern in PATTERNS[1:]:
        share = _share(pattern)[clear]
        share = share - share.mean()
        power, common = float(share @ share), float(share @ grey)
        if power == 0 or abs(common) < _LEAST_CONTRAST * power:
            continue
        correlation = abs(common) / (power * float(grey @ grey)) ** 0.5
        if correlation > best:
            best, found = correlation, pattern
    return found


def _tint(tones: np.ndarray) -> str:
    """The colour whose tone, or pair of tones, is nearest to those seen."""
    known = np.array(list(TINTS.values()), np.float32)[:, : len(tones)]
    # Tones that changed places are still the same pattern of the same colour.
    tones = tones[np.argsort(-tones.sum(1))]
    return tuple(TINTS)[int(((known - tones) ** 2).sum((1, 2)).argmin())]


@cache
def _share(pattern: str) -> np.ndarray:
    """`second_tone` at half the resolution."""
    full = second_tone(pattern)
    return (full[::2, ::2] + full[1::2, ::2] + full[::2, 1::2] + full[1::2, 1::2]) / 4
