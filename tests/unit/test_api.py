"""Requests and answers of the OpenAI API, over an engine in one process."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
import transformers

from megatron_lightning.data.chat.conversations import REASONING
from megatron_lightning.inference import load_engine
from megatron_lightning.inference.commands.load import find_codec
from megatron_lightning.inference.engine.following import Reader, ReaderGroup
from megatron_lightning.inference.engine.request_batch import Request
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.inference.serving.server import Server, ServerSettings
from megatron_lightning.inference.serving.serving_thread import Stepping, start
from tests.helpers.llama_tokenizer import llama_tokenizer
from tests.unit.inference.test_server_requests import post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n\n{% endif %}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{% if loud %}LOUD {% endif %}assistant:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"b": 1, "a": None}}}
ASK = {"role": "user", "content": "hi"}


def make_writer(folder: Path, ids: list[list[int]], vocabulary: int) -> None:
    """Save a model that writes texts: behind the first id of a text, the next ids."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=192,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(0.0 if "proj" in name else 1.0)
        rows = torch.randn(vocabulary, 64, generator=draws)
        model.model.embed_tokens.weight.copy_(torch.nn.functional.normalize(rows, dim=1))
        head = torch.zeros(vocabulary, 64)
        for text in ids:
            for before, token in itertools.pairwise(text):
                head[token] += model.model.embed_tokens.weight[before] * 10
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of a model that writes "▁world▁how", bytes of a face, and the end behind Hello, and
    a call behind the colon of an answer.
    """
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = llama_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ids = tokenizer.convert_tokens_to_ids
    face = [4 + byte for byte in "\U0001f600".encode()]
    make_writer(folder, [[ids("▁Hello"), ids("▁world"), ids("▁how"), *face, 2]], len(tokenizer))
    codec = find_codec(folder)
    engine: Any = load_engine(folder, stops=codec.stops, decode=codec.decode)
    stepping = Stepping(engine, 64)
    thread: threading.Thread = start(stepping, lambda: None)
    stepping.wait_until_ready()
    settings = ServerSettings(name="m", longest=stepping.longest, timeout_s=20)
    yield Server(stepping, codec, settings).app()
    assert stepping.failure is None and not stepping._sinks
    stepping.end()
    thread.join()


def ask(app: Any, path: str = TEXT, **body: Any) -> Any:
    """Return the answer, or the message of an error."""
    base: dict[str, Any] = {"prompt": "Hello"} if path == TEXT else {"messages": [ASK]}
    status, answer = post(app, path, {**base, "max_tokens": 8, "temperature": 0, **body})
    return answer if status == 200 else f"{status} {answer['error']['message']}"


def pieces(app: Any, path: str = TEXT, **body: Any) -> list[Any]:
    """Return the pieces of a stream."""
    lines = ask(app, path, stream=True, **body).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_completions_of_a_llama_tokenizer(app: Any) -> None:
    [choice] = ask(app, logprobs=1)["choices"]
    face = "\U0001f600"
    assert choice["text"] == f" world how{face}" and choice["finish_reason"] == "stop"
    logprobs = choice["logprobs"]
    names = [rf"bytes:\x{byte:02x}" for byte in face.encode()]
    assert logprobs["tokens"] == [" world", " how", *names]
    assert logprobs["text_offset"] == [0, 6, 10, 10, 10, 10]
    assert [max(top, key=top.get) for top in logprobs["top_logprobs"]] == logprobs["tokens"]
    [choice] = ask(app, logprobs=0, echo=True)["choices"]
    assert choice["text"] == f"Hello world how{face}"
    assert choice["logprobs"]["tokens"][:4] == ["<s>", "Hello", " world", " how"]
    assert choice["logprobs"]["text_offset"][:5] == [0, 0, 5, 11, 15]
    assert choice["logprobs"]["token_logprobs"][0] is None
    for stop, text in ((" how", " world"), ([" world"], ""), (face, " world how")):
        [choice] = ask(app, stop=stop)["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"stop": ["w\n", "\U0001f600"]}])
def test_streams_are_whole_answers_in_pieces(options: Any, app: Any) -> None:
    whole = ask(app, prompt=["Hello", "Hello world"], n=2, logprobs=1, **options)["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    streamed = pieces(app, prompt=["Hello", "Hello world"], n=2, logprobs=1, **options)
    for choice in whole:
        own = [p["choices"][0] for p in streamed if p["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert not any(piece["finish_reason"] for piece in own[:-1])
        for key, values in choice["logprobs"].items():
            assert joined(piece["logprobs"][key] for piece in own) == values
    [only] = pieces(app, echo=True, logprobs=1, max_tokens=0)
    assert only["choices"][0]["text"] == "Hello"
    usage = pieces(app, n=3, stream_options={"include_usage": True})[-1]["usage"]
    assert usage["prompt_tokens"] == 2 and usage["completion_tokens"] == 18


def test_choices_draw_from_their_own_seeds(app: Any) -> None:
    def drawn(**options: Any) -> list[str]:
        choices = ask(app, **{"temperature": 30.0, "max_tokens": 4, "logprobs": 0, **options})
        return ["|".join(choice["logprobs"]["tokens"]) for choice in choices["choices"]]

    texts = drawn(n=3, seed=5)
    assert texts == [*drawn(seed=5), *drawn(seed=6), *drawn(seed=7)]
    assert len(set(texts)) == 3
    assert drawn(n=2, seed=2**63 - 1)[1:] == drawn(seed=0)


def test_chats_have_bytes_and_streams_log_probabilities(app: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    [choice] = ask(app, CHAT, messages=messages, logprobs=True, top_logprobs=1)["choices"]
    content = choice["logprobs"]["content"]
    assert all(token["top_logprobs"][0]["bytes"] == token["bytes"] for token in content)
    spelled = b"".join(bytes(token["bytes"]) for token in content)
    assert spelled.decode(errors="replace")[:1] == choice["message"]["content"][:1]
    streamed = pieces(app, CHAT, messages=messages, logprobs=True)
    deltas = [piece["choices"][0] for piece in streamed]
    said = "".join(delta["delta"].get("content", "") for delta in deltas)
    assert said == choice["message"]["content"] and deltas[0]["delta"]["role"] == "assistant"
    assert joined(delta["logprobs"]["content"] for delta in deltas) == content


def test_values_without_an_effect_are_taken(app: Any) -> None:
    neutral = {
        "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": None, "n": 1, "top_p": 1,
        "seed": None, "user": "me", "response_format": {"type": "text"}, "unknown": None,
        "further": [], "top_k": -1, "stop": [], "ignore_eos": False, "suffix": "",
    }  # fmt: skip
    assert ask(app, best_of=1, **neutral)["choices"]
    answer = {
        "role": "assistant", "content": "y", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "prefix": False, "weight": 0, "note": "",
        "reasoning": "",
    }  # fmt: skip
    extras = {"tools": None, "tool_choice": None, "functions": None, "echo": False}
    assert ask(app, CHAT, messages=[ASK, answer, ASK], **neutral, **extras)["choices"]
    parts = [{"type": "text", "text": "a", "cache_control": None}]
    assert ask(app, CHAT, messages=[{"role": "user", "content": parts}])["choices"]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
    (TEXT, {"tempreature": 0}, "no parameter 'tempreature'"),
    (TEXT, {"x" * 9000: 1}, "no parameter 'xxxx"),
    (TEXT, {f"key{i}": i for i in range(5000)}, "no parameter 'key0'"),
    (TEXT, {"temperature": 10**400}, "temperature is 1000.*it has to be a number"),
    (TEXT, {"temperature": "1"}, "temperature is '1'; it has to be a number"),
    (TEXT, {"temperature": True}, "has to be a number"),
    (TEXT, {"temperature": 1e-310}, "Set it to 0, or to 1e-06"),
    (TEXT, {"temperature": float("nan")}, "is no finite number"),
    (TEXT, {"top_p": 0}, "top_p=0.0 is not a probability"),
    (TEXT, {"top_p": 10**400}, "top_p is 1000"),
    (TEXT, {"top_k": 1.5}, "top_k is 1.5; it has to be an integer"),
    (TEXT, {"max_tokens": 10**400}, "longer than the 192 tokens"),
    (TEXT, {"max_tokens": -1}, "max_tokens is -1; it has to be 0 or more"),
    (TEXT, {"max_tokens": 0, "n": 10**12, "echo": True}, "texts, and this server takes 64"),
    (TEXT, {"n": 0}, "n is 0; it has to be 1 or more"),
    (TEXT, {"n": 2, "best_of": 3}, "best_of=3 is not supported beside n=2"),
    (TEXT, {"stop": [""]}, "stop has to be a text"),
    (TEXT, {"stop": ["a"] * 5}, "list of up to 4"),
    (TEXT, {"prompt": []}, "prompt has to be a text"),
    (TEXT, {"prompt": [[]]}, "prompt has to be a text"),
    (TEXT, {"prompt": [1, True]}, "prompt is .*; it has to be a text"),
    (TEXT, {"prompt": None}, "prompt is None; it has to be a text"),
    (TEXT, {"prompt": [10**400]}, "token 1000.* is not among the 269"),
    (TEXT, {"prompt": "a " * 50000}, "a prompt of more than .* tokens .* longer than the 192"),
    (TEXT, {"prompt": "a " * 192}, "a prompt of .* tokens .* longer than the 192"),
    (CHAT, {"messages": [{**ASK, "content": "a " * 50000}]}, "a prompt of more than .* the 192"),
    (TEXT, {"logprobs": 5}, "best token only"),
    (TEXT, {"stream": "yes"}, "stream is 'yes'; it has to be true or false"),
    (TEXT, {"stream_options": {"other": 1}}, "no parameter 'stream_options.other'"),
    (CHAT, {"enable_thinking": False}, "no parameter 'enable_thinking'"),
    (TEXT, {"model": ["m"]}, "model is "),
    (CHAT, {"messages": []}, "messages is .*a list of messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "the role 'user' has no content"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role is missing"),
    (CHAT, {"messages": [{**ASK, "thinking": "x"}]}, "the role 'user' has thinking"),
    (CHAT, {"messages": [ASK, {**ASK, "prefix": True}]}, "no parameter 'messages.1.prefix'"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content.0.type is 'image_url'",
    ),
    (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function is missing"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice is 'required'"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "no variable 'chat_template'"),
    (CHAT, {"chat_template_kwargs": {"quiet": True}}, "no variable 'quiet'"),
    (CHAT, {"chat_template": "x"}, "no parameter 'chat_template'"),
]


@pytest.mark.parametrize(("path", "body", "message"), REFUSED)
def test_what_cannot_be_answered_is_refused_in_a_short_sentence(
    path: str, body: Any, message: str, app: Any
) -> None:
    answer = ask(app, path, **body)
    assert isinstance(answer, str), answer
    assert answer.startswith("400 ") and re.search(message, answer), answer
    assert len(answer) < 500


def test_variables_and_tools_are_rendered(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    codec = _codec_of(app)
    monkeypatch.setattr(codec, "ids", lambda text, special: seen.append(text) or [1, 5])
    ask(app, CHAT, chat_template_kwargs={"loud": True})
    assert seen[-1].endswith("LOUD assistant:")
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    messages = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
    ]
    ask(app, CHAT, messages=messages, tools=[TOOL])
    assert seen[-1] == (
        '[{"type": "function", "function": {"name": "look", "parameters": {"b": 1, "a": null}}}]'
        "\n\n"
        'user:hi\nassistant:<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>\n'
        "tool:found\nassistant:"
    )
    ask(app, CHAT, tools=[TOOL], tool_choice="none")
    assert seen[-1] == "user:hi\nassistant:"
    thought = "{% for m in messages %}{{ m.KEY }}{{ m.content }}{% endfor %}"
    for key in REASONING:
        monkeypatch.setattr(codec.tokenizer, "chat_template", thought.replace("KEY", key))
        ask(app, CHAT, messages=[ASK, {"role": "assistant", "content": "A", key: "Hm. "}, ASK])
        assert seen[-1] == "hiHm. Ahi"
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(codec.tokenizer, "chat_template", plain)
    assert "does not render tools" in ask(app, CHAT, tools=[TOOL])
    assert "does not render tool_calls" in ask(app, CHAT, messages=messages)
    monkeypatch.setattr(codec, "ids", lambda text, special: [])
    assert "renders the messages as an empty text" in ask(app, CHAT)


def _codec_of(app: Any) -> Any:
    routes = [route for route in app.routes if getattr(route, "path", "") == CHAT]
    return routes[0].endpoint.__self__._codec


CALL = '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
OTHER = '<tool_call>{"name": "other"}</tool_call>'
FUNCTION = {"name": "look", "arguments": '{"at": "é"}'}


@pytest.mark.parametrize(
    ("text", "content", "functions"),
    [
        (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", [FUNCTION, FUNCTION]),
        ('{"name": "look", "parameters": {"at": "é"}}', None, [FUNCTION]),
        ('[{"name": "look", "arguments": {}}]', None, [{"name": "look", "arguments": "{}"}]),
        ("Just text <tool", "Just text <tool", None),
        ('{"answer": 1}', '{"answer": 1}', None),
        (
            '<tool_call>{"name": "other"}</tool_call>',
            '<tool_call>{"name": "other"}</tool_call>',
            None,
        ),
        ('a <tool_call>{"name": "lo', 'a <tool_call>{"name": "lo', None),
        ('{"name": ["look"]}', '{"name": ["look"]}', None),
        (f"<think>a <tool_call> b</think>{CALL}", "<think>a <tool_call> b</think>", [FUNCTION]),
        (f"{CALL}? No.</think>\n\nHi", f"{CALL}? No.</think>\n\nHi", None),
        (
            'x</think>\n{"name": "look", "parameters": {"at": "é"}}',
            "x</think>",
            [FUNCTION],
        ),
        (f"{CALL}{OTHER}", f"{CALL}{OTHER}", None),
    ],
)
def test_calls_are_parsed_or_stay_text(
    text: str, content: str | None, functions: Any, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in a stream, which never sends a part of a call as text."""
    codec = _codec_of(app)
    monkeypatch.setattr(
        codec, "decode", lambda ids, special=False: text[: len(text) * (len(ids) - 4) // 6]
    )
    monkeypatch.setattr(codec, "ids", lambda text, special: [1, 5, 6, codec.ids_hello])
    codec.ids_hello = 260
    [choice] = ask(app, CHAT, tools=[TOOL])["choices"]
    message = choice["message"]
    assert message["content"] == content
    found = [call["function"] for call in message.get("tool_calls", [])] or None
    assert found == functions
    assert choice["finish_reason"] == ("tool_calls" if functions else "stop")
    deltas = [piece["choices"][0] for piece in pieces(app, CHAT, tools=[TOOL])]
    said = "".join(delta["delta"].get("content") or "" for delta in deltas)
    assert said == (content or "")
    calls = deltas[-1]["delta"].get("tool_calls", [])
    assert ([call["function"] for call in calls] or None) == functions
    assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    assert all(len(call["id"]) == 9 and call["type"] == "function" for call in calls)


def test_states_of_an_unread_stream_do_not_pile_up() -> None:
    """Neither in the reader, nor in an event loop that is busy."""

    class Told:
        sink: Any = None

        def add(self, tokens: Any, sampling: Any, num_scored: int, sink: Any, *_: Any) -> int:
            self.sink = sink
            return 1

        def give_up(self, number: int) -> None:
            pass

    async def follow() -> None:
        told: Any = Told()
        group = ReaderGroup()
        group.add(Reader(told, [1], Sampling(), follows=True, news=group.news))
        options = Sampling(max_new_tokens=2000)
        request = Request([1], options, torch.Generator(), 9999)
        tracemalloc.start()
        for token in range(2000):
            request.take([(token, -1.0, -1.0)])
            told.sink(request)
            if token % 2:
                await asyncio.sleep(0)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert size < 2 << 20
        assert [index async for index in group.changes(1e12)] == [0]
        assert len(group.states[0].tokens) == 2000

    asyncio.run(follow())
