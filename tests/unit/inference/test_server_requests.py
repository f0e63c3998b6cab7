"""The server's answers to single requests, in one process and without a socket."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from megatron_lightning.inference.engine.keys.prefix_cache import PrefixCounts
from megatron_lightning.inference.engine.request_batch import DraftCounts
from megatron_lightning.inference.serving.api_models import ApiError
from megatron_lightning.inference.serving.bodies import Bodies
from megatron_lightning.inference.serving.server import Server, ServerSettings


class _Idle:
    """A stepping thread without requests."""

    failure = weights = None
    max_queue = room = 8


def post(app: Any, path: str, body: Any) -> tuple[int, Any]:
    """Return status and JSON, or the content, of the answer to a JSON body."""
    headers = {"Content-Type": "application/json"}
    return _request(app, path, headers, json.dumps(body).encode())


def _request(app: Any, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, Any]:
    """Return status and JSON of a request's answer."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST" if body else "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }

    bodies = [body]

    async def receive() -> Any:
        if not bodies:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], json.loads(content) if content[:1] == b"{" else content


@pytest.mark.parametrize("host", ["a.example", "a.example/?", "a.example/x#", "a/b?x=:80", ""])
def test_no_header_host_stands_in_for_the_key(host: str) -> None:
    settings = ServerSettings(name="m", longest=64, api_key="secret")
    idle: Any = _Idle()
    app = Server(idle, idle, settings).app()
    for path in ("/v1/models", "/v1/models/m", "//v1/models", "/v1/../v1/models"):
        status, answer = _request(app, path, {"Host": host})
        assert status == 401 and "API key" in answer["error"]["message"]
        status, _ = _request(app, path, {"Host": host, "Authorization": "Bearer secreT"})
        assert status == 401
    key = {"Host": host, "Authorization": "Bearer secret"}
    assert _request(app, "/v1/models", key)[0] == 200
    assert _request(app, "/", {"Host": host})[0] == 200


def test_the_routed_path_decides_not_that_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases of starlette built the path of the URL from the header Host."""
    import starlette.requests

    class Elsewhere:
        path = "/"

    monkeypatch.setattr(starlette.requests.HTTPConnection, "url", property(lambda _: Elsewhere()))
    idle: Any = _Idle()
    app = Server(idle, idle, ServerSettings(name="m", longest=64, api_key="secret")).app()
    assert _request(app, "/v1/models", {"Host": "a"})[0] == 401


@pytest.mark.parametrize("key", ["secret", None])
def test_health_tells_counts_with_the_key_alone(key: str | None) -> None:
    idle: Any = _Idle()
    idle.engine = SimpleNamespace(
        draft_counts=DraftCounts(), prefix_counts=PrefixCounts(tokens=300, reused=200)
    )
    app = Server(idle, idle, ServerSettings(name="m", longest=64, api_key=key)).app()
    counts = {"status": "ok", "prompts": {"tokens": 300, "reused": 200}}
    for given in ({}, {"Authorization": "Bearer secreT"}):
        expected = counts if key is None else {"status": "ok"}
        assert _request(app, "/health", given) == (200, expected)
    assert _request(app, "/health", {"Authorization": "Bearer secret"}) == (200, counts)


def test_the_page_is_of_files_without_inline_code() -> None:
    idle: Any = _Idle()
    app = Server(idle, idle, ServerSettings(name="m", longest=64)).app()
    found = {path: _request(app, path, {})[1].decode() for path in ("/", "/page.css", "/page.js")}
    page, script = found["/"], found["/page.js"]
    assert "<script>" not in page and "onclick" not in page and "innerHTML" not in script
    ids = set(re.findall(r'id="(\w+)"', page))
    assert set(re.findall(r'\$\("(\w+)"\)', script)) <= ids
    assert {"system", "turns", "again", "chat"} <= ids


def test_arriving_bodies_are_limited_alone_and_together() -> None:
    """Without a length that announces them."""
    idle: Any = _Idle()
    idle.image_bytes = 0
    settings = ServerSettings(name="m", longest=64, max_body_bytes=800, max_waiting_bytes=1000)
    server = Server(idle, idle, settings)
    app, release = server.app(), asyncio.Event()
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/completions", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip

    async def status(parts: int) -> int:
        sent: list[Any] = []

        async def receive() -> Any:
            nonlocal parts
            if not parts:
                await release.wait()
                return {"type": "http.disconnect"}
            parts -= 1
            return {"type": "http.request", "body": b"x" * 300, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(dict(scope), receive, send)
        return int(sent[0]["status"])

    async def run() -> list[int]:
        slow = [asyncio.create_task(status(2)) for _ in range(2)]
        await asyncio.sleep(0.05)
        found = [await status(3)]
        release.set()
        for task in slow:
            found.append(await task)
        return [*found, await status(3)]

    first, *others, last = asyncio.run(run())
    assert first == 429
    assert 429 in others  # the second of the slow ones
    assert last == 413
    assert server._parsing_bytes == server._bodies.num_bytes == 0


class _Slow:
    """A request whose body begins, and ends when it may."""

    def __init__(self) -> None:
        self.headers = {"content-type": "application/json"}
        self.released = asyncio.Event()
        self.begun = False

    async def stream(self) -> AsyncIterator[bytes]:
        self.begun = True
        yield b"[" + b" " * 100
        await self.released.wait()
        yield b"]"


def test_a_slow_client_keeps_no_bytes_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of fits count apart, two at a time."""
    held: list[int] = []

    async def run() -> None:
        monkeypatch.setattr("megatron_lightning.inference.serving.bodies._ARRIVAL_S", 0.2)
        bodies = Bodies(1000, 600.0, lambda: held.append(bodies.num_bytes))
        with pytest.raises(ApiError, match=r"longer than the 0\.2 s") as refused:
            await bodies.read(_Slow())
        assert refused.value.status == 408
        assert held == [101]
        assert bodies.num_bytes == 0
        fits = [_Slow() for _ in range(3)]
        tasks = [asyncio.create_task(bodies.read_long(fit)) for fit in fits]
        await asyncio.sleep(0.02)
        assert [fit.begun for fit in fits] == [True, True, False]
        assert bodies.num_bytes == 0
        for fit in fits:
            fit.released.set()
        assert await asyncio.gather(*tasks) == [[], [], []]
        assert held == [101]

    asyncio.run(run())
