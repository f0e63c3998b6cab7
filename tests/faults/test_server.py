"""The server with the real openai client: answers, streams, refusals, readers that leave, ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("openai")
pytest.importorskip("transformers")
import openai

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference import Sampling, load_engine
from megatron_lightning.inference.commands.load import find_codec
from megatron_lightning.inference.commands.model_options import ModelOptions
from megatron_lightning.inference.commands.serve import serve
from tests.distributed.test_draft_commands import make_drafting
from tests.helpers.spoken import TEXT, make_spoken

PROMPT = "def f(x):"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Served:
    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.folder, self.port = folder, _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron_lightning", "serve", "--checkpoint", str(folder)),
                *("--port", str(self.port), "--device", "cpu", *options),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        assert self.process.stderr is not None
        threading.Thread(target=self._read, daemon=True).start()
        deadline = time.monotonic() + 90
        while not any("serving" in line for line in self.errors):
            assert self.process.poll() is None, self.errors
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.1)
        while self.status("/health") != 200:
            time.sleep(0.1)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        given = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"{self.url}/v1/completions", body, given)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()


@contextlib.contextmanager
def served(folder: Path, *options: str, **environment: str) -> Iterator[Served]:
    server = Served(folder, *options, **environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_spoken(tmp_path_factory.mktemp("served"))


def expected_text(folder: Path, prompt: str, most: int) -> tuple[str, Any]:
    codec = find_codec(folder)
    engine: Any = load_engine(folder, stops=codec.stops, decode=codec.decode)
    sampling = Sampling(max_new_tokens=most, temperature=0.0)
    [[one]] = engine.generate([codec.encode(prompt)], sampling)
    return codec.decode(one.tokens), one


LAYOUTS = [
    (),
    pytest.param(("--tensor-model-parallel-size", "2"), marks=pytest.mark.slow),
    pytest.param(("--pipeline-model-parallel-size", "2"), marks=pytest.mark.slow),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", LAYOUTS)
def test_the_openai_client(options: tuple[str, ...], folder: Path) -> None:
    with served(folder, *options) as server:
        client = server.client()
        _check_answers(client, folder)
        _check_refusals(server, client)
        _check_many(client)
        assert server.end() == 0


def _check_answers(client: openai.OpenAI, folder: Path) -> None:
    text, one = expected_text(folder, PROMPT, 24)
    assert [model.id for model in client.models.list()] == [folder.name]
    greedy: dict[str, Any] = {"model": folder.name, "temperature": 0.0, "max_tokens": 24}
    answer = client.completions.create(prompt=PROMPT, logprobs=1, **greedy)
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == one.reason
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert answer.usage.prompt_tokens == 1 + len(PROMPT)
    pieces = client.completions.create(prompt=PROMPT, stream=True, n=1, user="x", **greedy)
    assert "".join(piece.choices[0].text for piece in pieces) == text
    # A stop string that begins and ends inside of tokens.
    visible = next(
        i for i in range(2, len(text) - 2) if text.isascii() or text[i : i + 2].isprintable()
    )
    stop = text[visible : visible + 2]
    cut = client.completions.create(prompt=PROMPT, stop=stop, **greedy)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = client.completions.create(prompt=PROMPT, stop=[stop], stream=True, **greedy)
    assert "".join(piece.choices[0].text for piece in pieces) == text[: text.index(stop)]
    echoed = client.completions.create(
        model=folder.name, prompt=PROMPT, echo=True, logprobs=1, max_tokens=0
    )
    logprobs = echoed.choices[0].logprobs
    assert echoed.choices[0].text == PROMPT and logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == 1 + len(PROMPT) == len(logprobs.token_logprobs)
    chat = client.chat.completions.create(
        model=folder.name,
        messages=[{"role": "user", "content": PROMPT}],
        temperature=0.0,
        max_completion_tokens=12,
        logprobs=True,
    )
    pieces = client.chat.completions.create(
        model=folder.name,
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        temperature=0.0,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    streamed = list(pieces)
    said = "".join(p.choices[0].delta.content or "" for p in streamed if p.choices)
    assert said == chat.choices[0].message.content
    assert streamed[-1].usage.completion_tokens == len(chat.choices[0].logprobs.content)
    seeded = [
        client.completions.create(prompt=PROMPT, seed=7, max_tokens=12, model=folder.name)
        for _ in range(2)
    ]
    assert seeded[0].choices[0].text == seeded[1].choices[0].text


def _check_refusals(server: Served, client: openai.OpenAI) -> None:
    name = server.folder.name
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="x")
    for options, message in (
        ({"n": 300}, "for 300 texts, and this server takes 256 at once"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5"),
        ({"max_tokens": 500}, "longer than the 128"),
        ({"prompt": [1, 9999]}, "token 9999"),
        ({"prompt": ["x"] * 300}, "for 300 texts, and this server takes 256 at once"),
        ({"logprobs": 5}, "best token only"),
        ({"temperature": -1}, "temperature=-1"),
        ({"prompt": [1, 2], "extra_body": {"stop": ""}}, "stop has to be"),
        ({"extra_body": {"chat_template": "x"}}, "no parameter 'chat_template'"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(**{"model": name, "prompt": "x", **options})
    assert server.post(b"{")[0] == 400 and server.post(b"[1]")[0] == 400
    for body, message in (
        (rb'{"prompt": "\ud800"}', "surrogate without its pair"),
        (b'{"prompt": "x", "temperature": 1e-310}', "Set it to 0, or to 1e-06"),
        (b'{"prompt": "x", "temperature": 1%s}' % (b"0" * 400), "it has to be a number"),
        (b'{"prompt": "x", "temperature": 1e400}', "temperature=inf is no finite number"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature=nan is no finite number"),
    ):
        status, answer = server.post(body)
        assert status == 400 and message in answer["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="POST /v1/nothing: Not Found"):
        client.post("/nothing", cast_to=object)
    assert server.post(b'{"prompt": "%s"}' % (b"x" * (5 << 20)))[0] == 413
    assert server.post(b'{"prompt": "x"}', {"Content-Type": "text/plain"})[0] == 415
    assert server.post(b'{"prompt": "x"}', {"Host": "evil.example"})[0] == 403
    assert server.status("/") == server.status("/page.js") == 200
    assert server.status("/docs") == server.status("/openapi.json") == 404


def _check_many(client: openai.OpenAI) -> None:
    """200 requests of 16 threads, some of whose readers leave."""

    def ask(index: int) -> str:
        options: dict[str, Any] = {"model": client.models.list().data[0].id, "max_tokens": 8}
        options |= {"prompt": f"{index % 5}", "temperature": 0.0}
        if index % 10 == 3:
            stream = client.completions.create(stream=True, **{**options, "max_tokens": 100})
            next(iter(stream))
            stream.close()
            return ""
        return client.completions.create(**options).choices[0].text

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(200)))
    for rest in range(5):
        assert len({text for i, text in enumerate(texts) if i % 5 == rest and i % 10 != 3}) == 1


def _ask_many(server: Served, number: int) -> list[Future[int]]:
    """Return the statuses of long answers, of which at least some are being written."""
    client, begun = server.client(), threading.Event()

    def ask(index: int) -> int:
        begun.set()
        options: dict[str, Any] = {"model": server.folder.name, "prompt": "x", "seed": index}
        try:
            # Texts end at random: repeated, so that some are on their way.
            for _ in range(1000):
                client.completions.create(max_tokens=120, **options)
        except openai.APIStatusError as error:
            return error.status_code
        except openai.APIConnectionError:
            return 0
        return 200

    pool = ThreadPoolExecutor(number)
    pending = [pool.submit(ask, index) for index in range(number)]
    pool.shutdown(wait=False)
    begun.wait()
    time.sleep(1)
    return pending


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_key_a_drain_and_a_killed_rank(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with served(folder, "--api-key-file", str(key)) as server:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        client = server.client("secret")
        name = client.models.list().data[0].id
        stream = client.completions.create(model=name, prompt="x", max_tokens=100, stream=True)
        first = next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        rest = list(stream)  # what has begun is answered
        assert first.choices and rest[-1].choices[0].finish_reason in ("length", "stop")
        assert server.process.wait(30) == 0
    with served(folder, "--tensor-model-parallel-size", "2") as server:
        pending = _ask_many(server, 8)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        started = [int(pid) for pid in children.read_text().split()]
        for pid in started[-1:]:
            os.kill(pid, signal.SIGKILL)
        assert server.process.wait(60) != 0
        assert 503 in [status.result() for status in pending]


def test_what_cannot_be_served_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_LIGHTNING_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"max_waiting_mib=1 is below max_body_mib=4"):
        serve(ModelOptions(checkpoint=str(folder)), max_waiting_mib=1)
    with pytest.raises(ConfigError, match=r"host=0\.0\.0\.0 is reached by others"):
        serve(ModelOptions(checkpoint=str(folder)), host="0.0.0.0")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        serve(ModelOptions(checkpoint=str(folder)), api_key_file=str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron_lightning\[serve\]'"):
        serve(ModelOptions(checkpoint=str(folder)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_drafts_change_no_answer(tmp_path: Path) -> None:
    """Greedy and drawn texts."""
    model = make_drafting(tmp_path)
    options = ("--tokenizer-model", model[1], "--tokenizer-type", "huggingface")
    answers: list[list[Any]] = []
    for drafts in ("0", "2"):
        with served(Path(model[0]), *options, "--draft-tokens", drafts) as server:
            client = server.client()
            [name] = [own.id for own in client.models.list()]
            answers.append([])
            for start, temperature in ((0, 0.0), (9, 0.0), (9, 0.8)):
                answer = client.completions.create(
                    model=name,
                    prompt=TEXT[start : start + 12],
                    max_tokens=32,
                    temperature=temperature,
                    seed=5,
                )
                answers[-1].append((answer.choices[0].text, answer.choices[0].finish_reason))
            assert server.end() == 0
    assert answers[0] == answers[1]
    assert len(set("".join(text for text, _ in answers[0]))) > 20
