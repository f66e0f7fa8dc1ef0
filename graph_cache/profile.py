"""Which profile a run's decode steps get: the one that was asked for, where it can be had."""

from __future__ import annotations

from typing import get_args

from .errors import OWN_ERRORS, first_line, is_out_of_memory
from .layout import Profile
from .models.base import Adapter, ModelCall
from .reasons import Fallback
from .report import RunReport


class ProfileChoice:
    """The profile that was asked for, and why it may not be had.

    Parameters
    ----------
    asked
        "exact" or "fast".

    Raises
    ------
    ValueError
        If there is no such profile.
    """

    def __init__(self, asked: Profile) -> None:
        self.asked = asked
        self._no_fast: Fallback | None = None

    @property
    def asked(self) -> Profile:
        """May be set between calls, and holds from the next prefill on."""
        return self._asked

    @asked.setter
    def asked(self, profile: Profile) -> None:
        if profile not in get_args(Profile):
            raise ValueError(f"profile must be 'exact' or 'fast', not {profile!r}")
        self._asked = profile

    def give_up_fast(self, why: Fallback) -> Fallback:
        """Every later run is exact; returns the reason."""
        self._no_fast = why
        return why

    def choose(self, report: RunReport, adapter: Adapter, call: ModelCall) -> Profile:
        """The profile of a prefill's decode steps; the report tells why it is not the fast one."""
        if self.asked != "fast":
            return "exact"
        stop = self._no_fast
        if stop is None:
            try:
                stop = adapter.prepare_fast(call)
            except OWN_ERRORS as error:
                # The exact step may do all the same.
                stop = Fallback("profile_exact", first_line(error))
                if not is_out_of_memory(error):
                    self.give_up_fast(stop)
        if stop is None:
            return "fast"
        report.note(stop)
        return "exact"
