"""All reasons in one table, and a reason as it was met in a run."""

from __future__ import annotations

from dataclasses import dataclass

from . import reason_rows_comfyui, reason_table
from .reason_table import Path, Reason

__all__ = ["REASONS", "Fallback", "Path", "Reason"]

REASONS: dict[str, Reason] = {
    reason.code: reason for reason in (*reason_table.ROWS, *reason_rows_comfyui.ROWS)
}


@dataclass(frozen=True)
class Fallback:
    """A reason as it was met: a code from `REASONS` and what exactly was found.

    Parameters
    ----------
    code
        Key into `REASONS`.
    detail
        What the check found: a class name, a number of bytes, the first line of an error.

    Raises
    ------
    KeyError
        If the code is not in the table.
    """

    code: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.code not in REASONS:
            raise KeyError(f"unknown reason code {self.code!r}")

    @property
    def reason(self) -> Reason:
        """The code's row of the table."""
        return REASONS[self.code]

    @property
    def path(self) -> Path:
        """The best path that stays open."""
        return self.reason.path

    @property
    def sentence(self) -> str:
        """What happened, for a user, with what was found."""
        return self.reason.sentence.format(detail=self.detail or "no detail")

    @property
    def hint(self) -> str:
        """What a user can do about it."""
        return self.reason.hint
