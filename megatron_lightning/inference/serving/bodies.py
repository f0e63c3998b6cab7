"""Bodies of requests, limited in bytes and in the time in which they arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from megatron_lightning.inference.serving.api_models import ApiError

_LONG = 256 << 20
"""Bytes of a body of a fit."""
_NUM_LONG = 2
"""Bodies of fits that arrive at a time. Others wait."""
_ARRIVAL_S = 60.0
"""Time of a body: slow clients hold bytes that others cannot have."""


class Bodies:
    """Reads the bodies of requests.

    Args:
        largest: Bytes of a body.
        timeout_s: Time of a request.
        check: Raises if the bytes that the server holds are too many.
    """

    def __init__(self, largest: int, timeout_s: float, check: Callable[[], None]) -> None:
        self.num_bytes = 0
        """Bytes of arriving bodies, but for those of fits, which have a limit of their own."""
        self._largest, self._check = largest, check
        self._time_s = min(timeout_s, _ARRIVAL_S)
        self._long = asyncio.Semaphore(_NUM_LONG)

    async def read(self, http: Any) -> tuple[Any, int]:
        """Return the JSON of a request, and the number of bytes.

        Raises:
            ApiError: If the body is too large, too slow, or no JSON.
        """
        content = await self._arrived(http, self._largest, counts=True)
        return _json(content), len(content)

    async def read_long(self, http: Any) -> Any:
        """Return the JSON of a request of a fit, with the ids of all its prompts.

        Raises:
            ApiError: As in :meth:`read`.
        """
        async with self._long:
            return _json(await self._arrived(http, max(_LONG, self._largest), counts=False))

    async def _arrived(self, http: Any, limit: int, *, counts: bool) -> bytearray:
        kind = http.headers.get("content-type", "").partition(";")[0]
        if kind.strip().lower() != "application/json":
            raise ApiError(415, "the body has to be application/json.")
        try:
            return await asyncio.wait_for(self._parts(http, limit, counts=counts), self._time_s)
        except asyncio.TimeoutError as error:
            message = f"the body took longer than the {self._time_s:g} s that this server waits."
            raise ApiError(408, message) from error

    async def _parts(self, http: Any, limit: int, *, counts: bool) -> bytearray:
        content = bytearray()
        try:
            async for part in http.stream():
                content += part
                self.num_bytes += len(part) * counts
                if len(content) > limit:
                    raise ApiError(413, f"the body is larger than {limit:,} bytes.")
                if counts:
                    self._check()
        finally:
            self.num_bytes -= len(content) * counts
        return content


def _json(content: bytearray) -> Any:
    try:
        body = json.loads(content)
        # JSON may escape half of a surrogate pair ("\\ud800"), which is no character.
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400, "the body has an escaped surrogate without its pair, which is no character."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON ({error}).") from error
    return body
