"""Requests of the OpenAI API in our words. Unsupported options are refused by name. Values without
an effect are accepted.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.sampling import Sampling
from megatron_lightning.inference.text import Codec

_MOST_STOPS = 4
_DEFAULT_NEW_TOKENS: Mapping[bool, int] = {
    False: 16,
    True: 512,
}  # of completions as in OpenAI's API, and of chats
# Name -> values without an effect. A request may have these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1, None),
    "best_of": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
    "tools": ([], None),
    "functions": ([], None),
    "tool_choice": ("none", "auto", None),
    "function_call": ("none", "auto", None),
    "parallel_tool_calls": (True, False, None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "store": (False, None),
    "service_tier": ("auto", "default", None),
    "verbosity": (None,),
    "reasoning_effort": (None,),
}
_ANY = ("user", "metadata", "safety_identifier", "prompt_cache_key")
_READ = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "stop", "stream", "stream_options", "echo", "logprobs", "top_logprobs",
)  # fmt: skip


class ApiError(Exception):
    """An answer with an error.

    Args:
        status: HTTP status.
        message: The problem, and the remedy.
        param: Name of the parameter. None: no parameter is at fault.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "param": param,
                "code": None,
            }
        }


@dataclass(frozen=True)
class ApiRequest:
    """A request of the API."""

    prompts: list[list[int]]
    """Token ids of each prompt."""
    sampling: Sampling
    """Options of sampling. ``max_new_tokens`` is 1 if no token is wanted."""
    writes: bool
    """Whether new tokens are wanted."""
    is_chat: bool
    echo: bool
    """Whether the prompt is part of the answer."""
    logprobs: bool
    """Whether log-probabilities are."""
    stream: bool
    """Whether the answer comes in pieces."""
    usage_in_stream: bool
    """Whether the last piece counts tokens."""


def parse(body: Any, codec: Codec, *, name: str, longest: int, is_chat: bool) -> ApiRequest:
    """Return a request.

    Args:
        body: JSON.
        codec: The tokenizer.
        name: Name of the model.
        longest: Most tokens of a prompt with the new tokens.
        is_chat: Whether the request is a chat.

    Raises:
        ApiError: If the request cannot be answered.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {_kind(body)}; it has to be a JSON object.")
    _check_names(body)
    if body.get("model") not in (None, "", name):
        raise ApiError(
            404, f"there is no model {body['model']!r}; this server has {name!r}.", "model"
        )
    prompts = [_conversation(body, codec)] if is_chat else _prompts(body, codec)
    num_new = _wanted(body, is_chat)
    echo = _flag(body, "echo")
    logprobs = _logprobs(body, is_chat)
    # OpenAI's clients score a text by asking for no new tokens and an echo.
    if num_new == 0 and not echo:
        raise ApiError(400, "max_tokens=0 without echo=true asks for nothing.", "max_tokens")
    # The default number of new tokens adapts to the prompt. A requested number does not.
    room = longest - max(map(len, prompts))
    if num_new is None:
        num_new = min(_DEFAULT_NEW_TOKENS[is_chat], room)
    if num_new > room or room < 1:
        raise ApiError(
            400,
            f"a prompt of {longest - room} tokens with up to {max(num_new, 1)} new ones is longer "
            f"than the {longest} tokens of this server. Shorten the prompt, or lower max_tokens.",
            "max_tokens",
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, "stream_options takes include_usage.", "stream_options")
    return ApiRequest(
        prompts,
        _sampling(body, max(num_new, 1)),
        num_new > 0,
        is_chat,
        echo,
        logprobs,
        _flag(body, "stream"),
        bool(options.get("include_usage")),
    )


def _check_names(body: Mapping[str, Any]) -> None:
    for key, value in body.items():
        if key in _NEUTRAL and not any(value == neutral for neutral in _NEUTRAL[key]):
            raise ApiError(
                400,
                f"{key}={value!r} is not supported by this server. Leave it out, or serve the "
                "exported folder with vLLM or SGLang.",
                key,
            )
        if key not in _NEUTRAL and key not in _ANY and key not in _READ:
            raise ApiError(400, f"there is no parameter {key!r}. Leave it out.", key)


def _prompts(body: Mapping[str, Any], codec: Codec) -> list[list[int]]:
    prompt: Any = body.get("prompt")
    if isinstance(prompt, str):
        return [codec.encode(prompt)]
    if _are_ids(prompt):
        return [_checked_ids(prompt, codec)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(text, str) for text in prompt):
            return [codec.encode(text) for text in prompt]
        if all(map(_are_ids, prompt)):
            return [_checked_ids(ids, codec) for ids in prompt]
    raise ApiError(
        400, "prompt has to be a text, token ids, or a list of these, and not empty.", "prompt"
    )


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    )


def _checked_ids(ids: list[int], codec: Codec) -> list[int]:
    wrong_ids = [token for token in ids if not 0 <= token < codec.vocab_size]
    if wrong_ids:
        raise ApiError(
            400,
            f"token {wrong_ids[0]} is not among the {codec.vocab_size} of the tokenizer.",
            "prompt",
        )
    return ids


def _conversation(body: Mapping[str, Any], codec: Codec) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages has to be a list of messages, and not empty.", "messages")
    try:
        return codec.chat([_message(message) for message in messages])
    except ConfigError as error:
        raise ApiError(400, str(error), "messages") from error


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, "each message has to be an object with role and content.", "messages")
    unknown = set(message) - {"role", "content", "name"}
    if unknown:
        raise ApiError(400, f"messages with {sorted(unknown)[0]!r} are not supported.", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if any(not isinstance(part, str) for part in parts):
            raise ApiError(400, "the content of a message has to be text.", "messages")
        content = "".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str):
        raise ApiError(400, "the content of a message has to be text.", "messages")
    return {"role": message["role"], "content": content}


def _wanted(body: Mapping[str, Any], is_chat: bool) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        value = body.get(key)
        if value is None:
            continue
        least = 1 if is_chat else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ApiError(400, f"{key} is {value!r}; it has to be {least} or more.", key)
        return value
    return None


def _logprobs(body: Mapping[str, Any], is_chat: bool) -> bool:
    value, top = body.get("logprobs"), body.get("top_logprobs")
    if top not in (None, 0, 1):
        raise ApiError(400, f"top_logprobs={top!r}; this server has the best token only: 0 or 1.",
                       "top_logprobs")  # fmt: skip
    if is_chat:
        return _flag(body, "logprobs")
    if value is None or value is False:
        return False
    if value not in (0, 1):
        raise ApiError(
            400, f"logprobs={value!r}; this server has the best token only: 0 or 1.", "logprobs"
        )
    return True


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value not in (None, True, False):
        raise ApiError(400, f"{key} is {value!r}; it has to be true or false.", key)
    return bool(value)


def _number(body: Mapping[str, Any], key: str, default: float | None) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"{key} is {value!r}; it has to be a number.", key)
    return value


def _sampling(body: Mapping[str, Any], most: int) -> Sampling:
    stop = body.get("stop")
    stops: Sequence[Any] = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > _MOST_STOPS
        or not all(isinstance(text, str) and text for text in stops)
    ):
        raise ApiError(400, f"stop has to be a text, or a list of up to {_MOST_STOPS}.", "stop")
    seed, top_k = _number(body, "seed", None), _number(body, "top_k", None)
    if any(value is not None and not isinstance(value, int) for value in (seed, top_k)):
        raise ApiError(400, "seed and top_k have to be integers.", "seed")
    try:
        return Sampling(
            max_new_tokens=most,
            temperature=float(_number(body, "temperature", 1.0)),
            top_p=float(_number(body, "top_p", 1.0)),
            top_k=None if top_k in (None, 0, -1) else top_k,
            seed=secrets.randbits(48) if seed is None else seed % 2**63,
            stop=tuple(stops),
        )
    except ConfigError as error:
        raise ApiError(400, str(error)) from error


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")
