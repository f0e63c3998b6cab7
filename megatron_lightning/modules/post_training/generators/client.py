"""Requests to a generator: ``megatron-lightning serve --accept-weights``."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.serving.new_weights import Version

API_KEY = "MEGATRON_LIGHTNING_API_KEY"
"""Variable of the environment with the API key of the generators."""
_CONNECT_S = 10.0
_BUSY = frozenset({408, 429, 499})
"""Statuses below 500 that another attempt may change."""
STALE = 409


class AwayError(Exception):
    """A generator does not answer, or not now."""


class StaleError(Exception):
    """A generator has other weights than are asked for."""


class Generator:
    """A server.

    Args:
        url: Its address, such as http://127.0.0.1:8000.
        key: API key.

    Raises:
        ConfigError: If the address is none.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"generators has {url!r}, which is no address. Set it to those of your servers, "
                "such as http://127.0.0.1:8000."
            )
        if parts.path.rstrip("/").endswith("/v1"):
            raise ConfigError(
                f"generators has {url!r}, and the fit asks for /v1/rollouts below it. Leave /v1 "
                "out of the address."
            )
        try:
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(
                f"generators has {url!r}: {error}. Set a port from 1 to 65535, or none."
            ) from error
        self.url = url
        """Address, for messages."""
        self._parts = parts
        self._key = key

    def take_weights(self, version: Version, limit_s: float) -> None:
        """Make the generator take weights, and wait until it has.

        Raises:
            AwayError: If it does not answer.
            ConfigError: If it refuses them.
        """
        body = {"run": version.run, "step": version.step}
        self._post("/v1/weights", body, limit_s, "step")

    def continue_each(self, body: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """Return continuations of prompts. See ``serving.rollouts``.

        Raises:
            AwayError: If the generator does not answer, or ends before it has.
            StaleError: If it has older weights.
            ConfigError: If it refuses the prompts.
        """
        texts: list[dict[str, Any]] = self._post("/v1/rollouts", body, limit_s, "texts")
        return texts

    def _post(self, path: str, body: Mapping[str, Any], limit_s: float, name: str) -> Any:
        """Return the entry ``name`` of the answer."""
        try:
            status, content = self._answer(path, json.dumps(body).encode(), limit_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AwayError(f"{self.url}: {type(error).__name__} {error}") from error
        answer, shown = _object(content), content.decode(errors="replace")[:200]
        if status == http.client.OK:
            if name not in answer:
                raise ConfigError(
                    f"{self.url} answers {path} by {shown!r}, without {name}. Set generators to "
                    "addresses of megatron-lightning serve --accept-weights FOLDER."
                )
            return answer[name]
        reason = answer.get("error")
        message = reason.get("message", shown) if isinstance(reason, Mapping) else shown
        if status == STALE:
            raise StaleError(message)
        if status in _BUSY or status >= http.client.INTERNAL_SERVER_ERROR:
            raise AwayError(f"{self.url}: {status} {message}")
        raise ConfigError(f"{self.url} refuses {path} ({status}): {message} {_hint(status)}")

    def _answer(self, path: str, body: bytes, limit_s: float) -> tuple[int, bytes]:
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(self._parts.hostname or "", self._port, timeout=_CONNECT_S)
        try:
            connection.connect()
            if connection.sock is not None:
                connection.sock.settimeout(limit_s)
            headers = {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {self._key}",
                "Host": self._parts.netloc.rpartition("@")[2],
            }
            target = f"{self._parts.path.rstrip('/')}{path}"
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _object(content: bytes) -> Mapping[str, Any]:
    """Return the JSON object of an answer, or an empty one: proxies answer by pages."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def _hint(status: int) -> str:
    if status == http.client.UNAUTHORIZED:
        return f"Set {API_KEY} to the same key for the fit and for the server."
    if status == http.client.NOT_FOUND:
        return "Start it with --accept-weights FOLDER."
    return ""


def api_key() -> str:
    """Return the API key of the generators.

    Raises:
        ConfigError: If there is none.
    """
    key = os.environ.get(API_KEY)
    if not key:
        raise ConfigError(
            f"generators are set, and {API_KEY} is not: they take weights with an API key alone. "
            "Set it to the same key for the fit and for the servers."
        )
    return key
