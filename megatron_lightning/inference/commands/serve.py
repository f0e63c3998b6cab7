"""``megatron-lightning serve``: answer an OpenAI client with a trained model."""

from __future__ import annotations

import ipaddress
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.load import image_prompts_of
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.commands.text_codec import Codec
from megatron_lightning.inference.commands.text_job import ModelJob
from megatron_lightning.inference.engine.own_generate import OwnGenerate
from megatron_lightning.inference.engine.text_model import TextModel
from megatron_lightning.optional import require

_KEY = "MEGATRON_LIGHTNING_API_KEY"
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


def serve(  # noqa: PLR0917  # every argument is an option of the command line
    model: ModelOptions,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key_file: str | None = None,
    allowed_hosts: list[str] | None = None,
    max_queue: int = 256,
    timeout_s: float = 600.0,
    max_body_mib: float = 4.0,
    max_waiting_mib: float = 256.0,
    max_images: int = 8,
    max_image_mpixels: float = 16.0,
    accept_weights: str | None = None,
) -> None:
    """Serve a trained model: OpenAI's completions and chats, and a page to try prompts.

    The server is for looking at a checkpoint, for a few users. Addresses outside of this machine
    need an API key, in the environment (MEGATRON_LIGHTNING_API_KEY) or in a file.

    Args:
        model: The model, its tokenizer, layout and engine.
        host: Address to listen at.
        port: Port to listen at.
        name: Name of the model. Default: the checkpoint's name.
        api_key_file: File with the API key of requests.
        allowed_hosts: Further names of the server (the header Host).
        max_queue: Running and waiting requests, at most. Further requests are refused.
        timeout_s: Seconds of a request.
        max_body_mib: MiB of a request, with its images.
        max_waiting_mib: MiB of waiting requests with their images, at most. Further requests are
            refused.
        max_images: Images, or sounds, of a request, at most. They are data in the request: nothing
            is fetched.
        max_image_mpixels: Million pixels of an image, at most.
        accept_weights: Folder with new weights of a fit that this server samples for. Requests of
            the fit need an API key, and change the model for all.

    Raises:
        ConfigError: If the values cannot work together, or the packages are not installed.
        CheckpointError: If the checkpoint cannot be read.
        DataError: If the tokenizer cannot be read.
    """
    _check_installed()
    key = _api_key(api_key_file)
    _check_address(host, key)
    _check_bytes(max_body_mib, max_waiting_mib)
    _check_weights(accept_weights, key, model)
    job = ModelJob(model)
    job.check()
    settings = {
        "host": host,
        "port": port,
        "max_queue": max_queue,
        "checkpoint": model.checkpoint,
        "accept_weights": accept_weights,
        "images": {"max_images": max_images, "max_pixels": int(max_image_mpixels * 1e6)},
        "server": {
            "name": name or Path(model.checkpoint).name or model.checkpoint,
            "api_key": key,
            "hosts": _accepted_hosts(host, allowed_hosts or ()),
            "max_body_bytes": int(max_body_mib * 2**20),
            "max_waiting_bytes": int(max_waiting_mib * 2**20),
            "timeout_s": timeout_s,
        },
    }
    with _passed_on():
        job.run(_serve, settings)


def _serve(engine: TextModel, codec: Codec, settings: Any) -> None:
    """Serve on a single rank."""
    from megatron_lightning.inference.serving.own_stepping import OwnStepping
    from megatron_lightning.inference.serving.serving_thread import Stepping

    kind = OwnStepping if isinstance(engine, OwnGenerate) else Stepping
    stepping = kind(engine, settings["max_queue"])
    if settings["accept_weights"] is not None:
        from megatron_lightning.inference.serving.new_weights import NewWeights

        stepping.weights = NewWeights(engine, settings["checkpoint"], settings["accept_weights"])
    if engine.context.rank != 0:
        # The first rank drains, and then ends all ranks.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stepping.run()
        return
    _answer(stepping, codec, settings)


def _answer(stepping: Any, codec: Codec, settings: Any) -> None:
    require("uvicorn", "the server")
    import uvicorn

    from megatron_lightning.inference.serving.connections import patient_for
    from megatron_lightning.inference.serving.server import Server, ServerSettings
    from megatron_lightning.inference.serving.serving_thread import start

    server: Any = None

    def on_failure() -> None:
        if server is not None:
            server.should_exit = True

    # The engine steps in a thread, and the event loop only passes on texts: a slow client stops no
    # step.
    thread = start(stepping, on_failure)
    stepping.wait_until_ready()
    longest = stepping.longest
    images = image_prompts_of(stepping.engine, settings["checkpoint"], codec, **settings["images"])
    limits = ServerSettings(longest=longest, **settings["server"])
    app = Server(stepping, codec, limits, images).app()
    config = uvicorn.Config(
        app,
        http=patient_for(settings["server"]["timeout_s"]),
        host=settings["host"],
        port=settings["port"],
        log_level="warning",
        timeout_graceful_shutdown=int(settings["server"]["timeout_s"]),
    )
    server = uvicorn.Server(config)
    if stepping.failure is None:
        print(
            f"megatron-lightning: serving {settings['server']['name']} at "
            f"http://{settings['host']}:{settings['port']}/ (up to {longest} tokens a text).",
            file=sys.stderr,
            flush=True,
        )
        # The server has drained before raising the signal again.
        signal.signal(signal.SIGTERM, lambda *_: None)
        server.run()
    stepping.end()
    thread.join()
    if stepping.failure is not None:
        raise stepping.failure


@contextmanager
def _passed_on() -> Iterator[None]:
    """Pass SIGTERM on to the started processes. The first process drains."""

    def pass_on(*_: Any) -> None:
        children = multiprocessing.active_children()
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, signal.SIGTERM)
        if not children:
            raise SystemExit(128 + signal.SIGTERM)

    handler_before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler_before)


def _check_address(host: str, key: str | None) -> None:
    if not _is_loopback(host) and key is None:
        raise ConfigError(
            f"host={host} is reached by others, and there is no API key. Set {_KEY} or "
            "api_key_file, or host to 127.0.0.1."
        )


def _check_bytes(body: float, waiting: float) -> None:
    if waiting < body:
        raise ConfigError(
            f"max_waiting_mib={waiting:g} is below max_body_mib={body:g}, so that a server without "
            "any request would refuse a body that it allows. Set max_waiting_mib to "
            f"{body:g} or more, or max_body_mib lower."
        )


def _check_weights(folder: str | None, key: str | None, model: ModelOptions) -> None:
    if folder is None:
        return
    if key is None:
        raise ConfigError(
            f"accept_weights={folder} lets requests change the model, and there is no API key. Set "
            f"{_KEY} or api_key_file, and the same key where the fit runs."
        )
    if model.adapters is not None:
        raise ConfigError(
            f"accept_weights={folder} and adapters={model.adapters}: new weights are a model or "
            "its adapters. Leave adapters out: the fit brings them."
        )


def _accepted_hosts(host: str, allowed_hosts: Iterable[str]) -> frozenset[str] | None:
    """Return the names of the server in the header Host. None: any name."""
    names = frozenset(map(str.lower, allowed_hosts))
    # A web page could reach a local server under a foreign name (DNS rebinding).
    if _is_loopback(host) or names:
        return _LOOPBACK | names | {host.strip("[]").lower()}
    return None


def _check_installed() -> None:
    for package in ("fastapi", "uvicorn"):
        require(package, "the server")


def _api_key(file: str | None) -> str | None:
    if file is None:
        return os.environ.get(_KEY) or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"api_key_file={file} cannot be read ({error.strerror}).") from error
    if not key:
        raise ConfigError(f"api_key_file={file} is empty. Write a key into it.")
    return key


def _is_loopback(host: str) -> bool:
    if host.lower() in _LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
