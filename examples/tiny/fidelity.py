"""How near one picture is to another: equality, PSNR and SSIM, with alpha."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

_GREY = 128.0
_PEAK = 255.0


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How near a picture is to another.

    Parameters
    ----------
    equal
        Whether they are the same, byte for byte; the colour under alpha 0 counts too.
    psnr, ssim
        Of RGB over grey, dB and up to 1.
    alpha_psnr
        Of alpha, dB.
    """

    equal: bool
    psnr: float
    ssim: float
    alpha_psnr: float


def fidelity(a: np.ndarray, b: np.ndarray) -> Fidelity:
    """Compare two pictures.

    Parameters
    ----------
    a, b
        uint8 ``(height, width, 4)``, alpha straight, at least 11 x 11.
    """
    rgb_a, rgb_b = over_grey(a), over_grey(b)
    return Fidelity(
        np.array_equal(a, b), psnr(rgb_a, rgb_b), ssim(rgb_a, rgb_b), psnr(a[..., 3], b[..., 3])
    )


def over_grey(rgba: np.ndarray) -> np.ndarray:
    """What is seen of a picture over an even grey: float64 ``(height, width, 3)`` of 0..255."""
    share = rgba[..., 3:].astype(np.float64) / 255
    return rgba[..., :3] * share + _GREY * (1 - share)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of values of 0..255 in dB; infinite for equal ones."""
    error = np.square(a.astype(np.float64) - b.astype(np.float64)).mean()
    return float("inf") if error == 0 else float(10 * np.log10(_PEAK**2 / error))


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Structural similarity, the mean over channels and windows.

    With the constants and the Gaussian window of Wang, Bovik, Sheikh, Simoncelli, "Image Quality
    Assessment: From Error Visibility to Structural Similarity", IEEE Transactions on Image
    Processing 13 (4), 2004; windows that reach beyond the picture are left out.

    Parameters
    ----------
    a, b
        Values of 0..255, ``(height, width, channels)``.
    """
    c1, c2 = (0.01 * _PEAK) ** 2, (0.03 * _PEAK) ** 2
    at = torch.arange(11, dtype=torch.float64) - 5
    window = torch.exp(-at.square() / (2 * 1.5**2))
    window /= window.sum()

    def mean(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(x, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))

    # Channels as a batch: each is a picture of its own.
    x, y = (torch.from_numpy(np.moveaxis(p, 2, 0)[:, None].astype(np.float64)) for p in (a, b))
    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    index = (2 * mx * my + c1) * (2 * vxy + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return index.mean().item()


def spread(values: Iterable[float]) -> dict[str, float | int | None]:
    """Mean and minimum of the finite values, None without any; and how many were infinite."""
    values = list(values)
    finite = [value for value in values if np.isfinite(value)]
    return {
        "mean": sum(finite) / len(finite) if finite else None,
        "minimum": min(finite, default=None),
        "infinite": len(values) - len(finite),
    }
