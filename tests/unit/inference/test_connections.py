"""Clients that read nothing, or send half of a header, over a socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
import uvicorn

from megatron_lightning.inference.serving.connections import patient_for

TIMEOUT_S = 0.6
PIECE = b"x" * 65536


class _Writer:
    """Application that writes without end, and counts what it wrote."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/short":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"short"})
            return
        self.num_open += 1
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = False
        while not gone:
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            self.num_bytes += len(PIECE)
            # As starlette does: a client that has gone is seen by receive.
            gone = self.num_bytes % (64 * len(PIECE)) == 0 and await _is_gone(receive)
        self.num_open -= 1


async def _is_gone(receive: Any) -> bool:
    import asyncio

    try:
        message = await asyncio.wait_for(receive(), 0.01)
    except asyncio.TimeoutError:
        return False
    return bool(message["type"] == "http.disconnect")


@pytest.fixture
def served() -> Iterator[tuple[_Writer, int]]:
    writer = _Writer()
    config = uvicorn.Config(
        writer, port=0, http=patient_for(TIMEOUT_S), log_level="critical", lifespan="off",
        timeout_keep_alive=60, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield writer, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_clients_that_read_nothing_cost_bounded_memory_and_are_dropped(
    served: tuple[_Writer, int],
) -> None:
    writer, port = served
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(TIMEOUT_S / 3)
        written = writer.num_bytes
        assert 0 < written < 64 << 20  # the buffers of the system, and asyncio's
        deadline = time.monotonic() + 20 * TIMEOUT_S
        while writer.num_open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert writer.num_open == 0


def test_a_reader_is_served_longer_than_the_time_and_idle_connections_end(
    served: tuple[_Writer, int],
) -> None:
    _, port = served
    with (
        socket.create_connection(("127.0.0.1", port)) as client,
        socket.create_connection(("127.0.0.1", port)) as half,
        socket.create_connection(("127.0.0.1", port)) as idle,
    ):
        half.sendall(b"GET /short HTTP/1.1\r\nHo")
        idle.sendall(b"GET /short HTTP/1.1\r\nHost: a\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        idle.sendall(b"GET /short HT")
        client.sendall(b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n")
        begin = time.monotonic()
        while time.monotonic() - begin < 3 * TIMEOUT_S:
            assert client.recv(1 << 16)
            time.sleep(0.001)
        for other in (half, idle):
            other.settimeout(10 * TIMEOUT_S)
            try:
                while other.recv(4096):
                    pass
            except ConnectionResetError:
                pass
