"""The two kinds of failure: the user's problem (GpudiagError, one clear line) and our bug (a traceback)."""

from __future__ import annotations


class GpudiagError(Exception):
    """A problem that the user can act on. `commands` prints it as two lines on stderr and exits with 1.

    message: what went wrong and where (the path, the option).
    hint: the next step, phrased as something to do.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[GpudiagError], tuple[str, str]]:
        """Pickles with its hint: ranks are read by processes of their own."""
        return type(self), (self.message, self.hint)
