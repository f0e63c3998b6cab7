"""The HTTP side of ``megatron-lightning serve``: OpenAI's completions and chats, models and health.

No request changes the server, but new weights for ``--accept-weights``, with the API key: there is
no CORS, bodies are JSON of a limited size, and templates come from the tokenizer alone.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from megatron_lightning.data.images.image_prompts import ImagePrompts
from megatron_lightning.inference.commands.text_codec import Codec
from megatron_lightning.inference.engine.following import Reader, ReaderGroup
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.inference.serving.api_answers import Answer
from megatron_lightning.inference.serving.api_models import ApiError
from megatron_lightning.inference.serving.api_requests import ApiRequest, parse
from megatron_lightning.inference.serving.bodies import Bodies
from megatron_lightning.inference.serving.rollouts import RolloutApi
from megatron_lightning.inference.serving.serving_thread import Stepping
from megatron_lightning.optional import missing

try:
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect
except ImportError as error:
    raise missing("fastapi", "the server", error=error) from error

_GONE = 499
"""Status of an answer that nobody reads."""
_PUBLIC: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Path -> file and media type of the page to try prompts. The page needs no key."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits of a server."""

    name: str
    """Name of the model."""
    longest: int
    """Most tokens of a prompt with the new tokens."""
    api_key: str | None = None
    """Required API key of requests. None: no key is required."""
    hosts: frozenset[str] | None = None
    """Accepted names in the header Host. None: all."""
    max_body_bytes: int = 4 << 20
    max_waiting_bytes: int = 256 << 20
    """Bytes of requests that arrive or are being parsed, and of images of waiting requests."""
    timeout_s: float = 600.0
    """Time of a request."""


class Server:
    """Answers requests.

    Args:
        stepping: The engine's thread.
        codec: The tokenizer.
        settings: Limits.
        images: Makes prompts with images. None: the model reads text alone.
    """

    def __init__(
        self,
        stepping: Stepping,
        codec: Codec,
        settings: ServerSettings,
        images: ImagePrompts | None = None,
    ) -> None:
        self._stepping = stepping
        self._codec = codec
        self._images = images
        self._settings = settings
        self._parsing = asyncio.Lock()
        self._parsing_bytes = 0
        self._bodies = Bodies(settings.max_body_bytes, settings.timeout_s, self._check_bytes)
        self._rollouts = RolloutApi(stepping, self._bodies.read_long, _disconnected)

    def app(self) -> FastAPI:
        """Return the application."""
        app = FastAPI(title="megatron-lightning", docs_url=None, redoc_url=None, openapi_url=None)
        app.middleware("http")(self._guard)
        app.add_exception_handler(ApiError, _failed)
        app.add_exception_handler(HTTPException, _failed)  # no such path or method
        app.add_exception_handler(Exception, _failed)
        for path, (file, kind) in _PUBLIC.items():
            app.get(path)(_static(file, kind))
        app.get("/health")(self._health)
        app.get("/v1/models")(self._models)
        app.get("/v1/models/{name:path}")(self._model)
        app.post("/v1/completions")(self._completions)
        app.post("/v1/chat/completions")(self._chat)
        if self._stepping.weights is not None:
            app.post("/v1/rollouts")(self._texts)
            app.post("/v1/weights")(self._weights)
        return app

    async def _guard(
        self, request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Refuse foreign hosts, and requests without the key."""
        settings = self._settings
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if settings.hosts is not None and name.strip("[]").lower() not in settings.hosts:
            message = f"the header Host is {host!r}, which this server does not answer."
            return _answer_of(ApiError(403, message))
        # The path that is routed. The path of request.url would be parsed together with the header
        # Host, which a client chooses.
        if request.scope["path"] not in (*_PUBLIC, "/health") and not self._has_key(request):
            return _answer_of(ApiError(401, "the API key is missing or wrong."))
        response = await answer(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    def _has_key(self, request: Request) -> bool:
        """Return whether a request has the key, if there is one."""
        key = self._settings.api_key
        given_key = request.headers.get("authorization", "").removeprefix("Bearer ")
        return key is None or hmac.compare_digest(given_key.encode(), key.encode())

    async def _health(self, request: Request) -> Response:
        if self._stepping.failure is not None:
            return _answer_of(ApiError(503, "the engine has failed."))
        if not self._has_key(request):
            # Counts of reused tokens tell which prompts the server has seen.
            return JSONResponse({"status": "ok"})
        engine = self._stepping.engine
        drafts, prefixes = engine.draft_counts, engine.prefix_counts
        counts = {"drafts": asdict(drafts)} if drafts.proposed else {}
        counts |= {"prompts": asdict(prefixes)} if prefixes.tokens else {}
        return JSONResponse({"status": "ok", **counts})

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._described()]}

    async def _model(self, name: str) -> dict[str, Any]:
        if name != self._settings.name:
            raise ApiError(404, f"there is no model {name!r}.", "model")
        return self._described()

    def _described(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "id": settings.name,
            "object": "model",
            "created": 0,
            "owned_by": "megatron-lightning",
            "max_model_len": settings.longest,
        }

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, is_chat=True)

    async def _answer(self, http: Request, *, is_chat: bool) -> Response:
        settings = self._settings
        deadline = time.monotonic() + settings.timeout_s
        try:
            body, size = await self._bodies.read(http)
        except ClientDisconnect:
            return Response(status_code=_GONE)
        self._check_free(1, size)  # before texts are encoded
        self._parsing_bytes += size
        try:
            async with self._parsing:
                # Beside the event loop: a long prompt takes seconds.
                request = await asyncio.to_thread(
                    parse,
                    body,
                    self._codec,
                    name=settings.name,
                    longest=settings.longest,
                    is_chat=is_chat,
                    images=self._images,
                )
        finally:
            self._parsing_bytes -= size
        self._check_room(request)
        answer = Answer(request, settings.name, self._codec)
        texts, scores = ReaderGroup(), ReaderGroup()
        self._begin(request, texts, scores)
        if request.stream:
            events = self._events(request, answer, texts, scores, deadline)
            return StreamingResponse(events, media_type="text/event-stream")
        return await self._whole(http, answer, texts, scores, deadline)

    async def _texts(self, http: Request) -> Response:
        found = await self._rollouts.texts(http)
        return Response(status_code=_GONE) if found is None else JSONResponse(found)

    async def _weights(self, http: Request) -> Response:
        return JSONResponse(await self._rollouts.weights(http))

    def _check_room(self, request: ApiRequest) -> None:
        """Check that the queue has room for all texts of a request.

        Raises:
            ApiError: If there is none now, or never.
        """
        is_scored = request.echo and request.logprobs
        number = request.num_texts + len(request.prompts) * is_scored
        if number > self._stepping.max_queue:
            message = (
                f"the request is for {number} texts, and this server takes "
                f"{self._stepping.max_queue} at once. Send fewer prompts, or lower n."
            )
            raise ApiError(400, message, "prompt")
        self._check_free(number, 0 if request.images is None else request.images.num_bytes)

    def _check_free(self, number: int, size: int) -> None:
        """Check that there is room for ``number`` texts, and ``size`` bytes."""
        if number > self._stepping.room:
            raise ApiError(429, "too many requests wait. Try again later.")
        self._check_bytes(size)

    def _check_bytes(self, size: int = 0) -> None:
        """Check that there is room for ``size`` bytes beside those of other requests."""
        limit, parsing = self._settings.max_waiting_bytes, self._parsing_bytes
        held = self._bodies.num_bytes + parsing + self._stepping.image_bytes + size
        if held > limit:
            raise ApiError(
                429,
                f"requests that arrive or wait have {held:,} bytes with this one, and this server "
                f"holds {limit:,}. Try again later, or send less, such as smaller images.",
            )

    def _begin(self, request: ApiRequest, texts: ReaderGroup, scores: ReaderGroup) -> None:
        """Begin to write, and to score prompts."""
        stepping, follows = self._stepping, request.stream
        try:
            for index in range(request.num_texts):
                sampling, tokens = request.sampling_of(index), request.prompt(index)
                texts.add(
                    Reader(
                        stepping,
                        tokens,
                        sampling,
                        images=request.images,
                        follows=follows,
                        news=texts.news,
                    )
                    if request.writes
                    else None
                )
            # Log-probabilities of prompts come from scoring requests beside the writing requests.
            for prompt in request.prompts if request.echo and request.logprobs else ():
                count = len(prompt) - 1
                scores.add(
                    Reader(stepping, prompt, Sampling(), count, news=scores.news) if count else None
                )
        except ApiError:
            texts.give_up()
            scores.give_up()
            raise

    async def _whole(
        self,
        http: Request,
        answer: Answer,
        texts: ReaderGroup,
        scores: ReaderGroup,
        deadline: float,
    ) -> Response:
        # A client may leave: its requests then stop taking room.
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(http))
        work: asyncio.Future[Any] = asyncio.gather(texts.end(deadline), scores.end(deadline))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=_GONE)
            work.result()
        finally:
            gone.cancel()
            work.cancel()
            texts.give_up()
            scores.give_up()
        return JSONResponse(answer.whole(scores.states, texts.states))

    async def _events(
        self,
        request: ApiRequest,
        answer: Answer,
        texts: ReaderGroup,
        scores: ReaderGroup,
        deadline: float,
    ) -> AsyncIterator[str]:
        """Yield the pieces of a stream, as texts grow. A disconnected client ends the texts."""
        try:
            await scores.end(deadline)

            def piece(index: int) -> str:
                prompt = scores.states[index // request.num_choices] if scores.states else None
                new = answer.piece(index, prompt, texts.states[index])
                return "" if new is None else _event(new)

            if not request.writes:
                for index in range(request.num_texts):
                    yield piece(index)
            async for index in texts.changes(deadline):
                if new := piece(index):
                    yield new
            if request.usage_in_stream:
                yield _event(answer.last_piece(texts.states))
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body)
        finally:
            texts.give_up()
            scores.give_up()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _disconnected(http: Request) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(0.2)


def _static(file: str, kind: str) -> Callable[[], Awaitable[Response]]:
    text = files(__package__).joinpath("static", file).read_text(encoding="utf-8")

    async def answer() -> Response:
        policy = "default-src 'self'; frame-ancestors 'none'"
        return Response(text, media_type=kind, headers={"Content-Security-Policy": policy})

    return answer


def _answer_of(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status)


async def _failed(http: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return _answer_of(error)
    if isinstance(error, HTTPException):
        message = f"{http.method} {http.scope['path']}: {error.detail}."
        return _answer_of(ApiError(error.status_code, message))
    # The traceback goes to the server's log, not to the client.
    return _answer_of(ApiError(500, "the server has failed; its log says why."))
