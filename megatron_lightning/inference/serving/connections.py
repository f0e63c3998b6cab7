"""Connections that end by a time-out, whatever the client does."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_lightning.optional import missing

try:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ImportError as error:
    raise missing("uvicorn", "the server", error=error) from error


def patient_for(timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol of HTTP with limited patience.

    A connection is dropped after ``timeout_s`` seconds, or half of that, in which the client has
    read nothing of the bytes to read, or has sent no whole request. The bytes to read stay below a
    limit of asyncio: behind it the answer waits.
    """

    class Patient(AutoHTTPProtocol):  # type: ignore[misc]
        """Connection looked at twice in the time."""

        _timer: asyncio.TimerHandle | None = None
        _unread = 0
        _has_read = False
        _last_request: Any = None

        def connection_made(self, transport: Any) -> None:
            """Begin to look."""
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """Look no longer."""
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def resume_writing(self) -> None:
            """Take note that the client has read."""
            self._has_read = True
            super().resume_writing()

        def _wait(self) -> None:
            self._timer = self.loop.call_later(timeout_s / 2, self._look)

        def _look(self) -> None:
            unread = self.transport.get_write_buffer_size()
            reads_nothing = 0 < self._unread <= unread and not self._has_read
            is_idle = self.cycle is None or self.cycle.response_complete
            if reads_nothing or (is_idle and self.cycle is self._last_request):
                self.transport.abort()
                return
            self._unread = unread
            self._has_read = False
            self._last_request = self.cycle
            self._wait()

    return Patient
