"""Requests of the OpenAI API in our words."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_lightning.data.chat.conversations import REASONING
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.images.image_parts import has_images
from megatron_lightning.data.images.image_prompts import ImagePrompts, PromptImages
from megatron_lightning.errors import ConfigError
from megatron_lightning.inference.commands.text_codec import Codec
from megatron_lightning.inference.engine.uncached_loop import Sampling
from megatron_lightning.inference.serving.api_images import chat_with_images
from megatron_lightning.inference.serving.api_models import (
    ApiError,
    ChatBody,
    CompletionBody,
    Message,
    Part,
    shown,
    validated,
)

_MOST_STOPS = 4
_CHARACTERS, _MARGIN = 8, 16
"""Characters of a token, and tokens that a cut text may have more, in an early look at a text."""
_SEEDS = 1 << 63
_DEFAULT_NEW_TOKENS: Mapping[bool, int] = {
    False: 16,
    True: 512,
}  # of completions as in OpenAI's API, and of chats
Body = CompletionBody | ChatBody


@dataclass(frozen=True)
class ApiRequest:
    """A request of the API."""

    prompts: list[list[int]]
    """Token ids of each prompt."""
    num_choices: int
    """Texts of each prompt. Text i continues prompt i // num_choices."""
    sampling: Sampling
    """Options of sampling. ``max_new_tokens`` is 1 if no token is wanted."""
    writes: bool
    """Whether new tokens are wanted."""
    is_chat: bool
    echo: bool
    """Whether the prompt is part of the answer."""
    logprobs: bool
    """Whether log-probabilities are part of the answer."""
    stream: bool
    """Whether the answer comes in pieces."""
    usage_in_stream: bool
    """Whether the last piece counts tokens."""
    tools: frozenset[str] = frozenset()
    """Names of functions that the model may call."""
    most_calls: int | None = None
    """Calls in an answer, at most. None: any number."""
    images: PromptImages | None = None
    """Images of a chat."""

    @property
    def num_texts(self) -> int:
        """Number of texts in the answer."""
        return len(self.prompts) * self.num_choices

    def prompt(self, index: int) -> list[int]:
        """Return the prompt of a text."""
        return self.prompts[index // self.num_choices]

    def sampling_of(self, index: int) -> Sampling:
        """Return the options of a text. Text i draws from the seed plus i."""
        seed = (self.sampling.seed + index) % _SEEDS
        return Sampling(**{**vars(self.sampling), "seed": seed})


def parse(
    body: Any,
    codec: Codec,
    *,
    name: str,
    longest: int,
    is_chat: bool,
    images: ImagePrompts | None = None,
) -> ApiRequest:
    """Return a request.

    Args:
        body: JSON.
        codec: The tokenizer.
        name: Name of the model.
        longest: Most tokens of a prompt with the new tokens.
        is_chat: Whether the request is a chat.
        images: Makes prompts with images. None: the model reads text alone.

    Raises:
        ApiError: If the request cannot be answered.
    """
    request: Body = validated(ChatBody, body) if is_chat else validated(CompletionBody, body)
    if request.model not in (None, "", name):
        raise ApiError(
            404, f"there is no model {shown(request.model)}; this server has {name!r}.", "model"
        )
    chat_images = None
    if isinstance(request, ChatBody) and has_images(body):
        chat, encode = request, partial(codec.ids, special=False)

        def check(text: str, num_image_tokens: int) -> None:
            """Refuse a chat that is too long, before its images are decoded."""
            number = len(_encoded(encode, text, longest)) + num_image_tokens
            _most_new_tokens(chat, number, longest)

        prompt = chat_with_images(request, body, images, check)
        chat_images = prompt.images
        prompts, echo, tools = [prompt.ids], False, _tools(request)
    elif isinstance(request, ChatBody):
        text = _conversation(request, body, codec)
        prompts, echo, tools = [_chat_ids(text, codec, longest)], False, _tools(request)
    else:
        prompts, tools = _prompts(request, codec, longest), frozenset[str]()
        echo = bool(request.echo)
    most = _most_new_tokens(request, max(map(len, prompts)), longest)
    options = request.stream_options
    return ApiRequest(
        prompts,
        _num_choices(request),
        _sampling(request, max(most, 1)),
        most > 0,
        is_chat,
        echo,
        _logprobs(request),
        bool(request.stream),
        bool(options and options.include_usage),
        tools,
        1 if isinstance(request, ChatBody) and request.parallel_tool_calls is False else None,
        chat_images,
    )


def _most_new_tokens(request: Body, num_prompt: int, longest: int) -> int:
    """Return the wanted number of new tokens. The default adapts to the prompt, and a requested
    number does not.
    """
    is_chat = isinstance(request, ChatBody)
    wanted: int | None = None
    for key in ("max_completion_tokens", "max_tokens"):
        value = getattr(request, key)
        least = 1 if is_chat else 0
        if value is not None and value < least:
            raise ApiError(400, f"{key} is {shown(value)}; it has to be {least} or more.", key)
        wanted = value if wanted is None else wanted
    # OpenAI's clients score a text by asking for no new tokens and an echo.
    if wanted == 0 and not (isinstance(request, CompletionBody) and request.echo):
        raise ApiError(400, "max_tokens=0 without echo=true asks for nothing.", "max_tokens")
    room = longest - num_prompt
    if wanted is None:
        wanted = min(_DEFAULT_NEW_TOKENS[is_chat], room)
    if wanted > room or room < 1:
        raise ApiError(
            400,
            f"a prompt of {num_prompt} tokens with up to {shown(max(wanted, 1))} new ones is "
            f"longer than the {longest} tokens of this server. Shorten the prompt, or lower "
            "max_tokens.",
            "max_tokens",
        )
    return wanted


def _num_choices(request: Body) -> int:
    number = 1 if request.n is None else request.n
    best_of = request.best_of if isinstance(request, CompletionBody) else None
    if best_of not in (None, number):
        raise ApiError(
            400,
            f"best_of={shown(best_of)} is not supported beside n={shown(number)}. Leave it out.",
            "best_of",
        )
    return number


def _prompts(request: CompletionBody, codec: Codec, longest: int) -> list[list[int]]:
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    prompts = [
        _encoded(codec.encode, one, longest) if isinstance(one, str) else list(one) for one in given
    ]
    if not prompts or not all(prompts):
        message = "prompt has to be a text, token ids, or a list of these, and not empty."
        raise ApiError(400, message, "prompt")
    for token in (token for prompt in prompts for token in prompt):
        if not 0 <= token < codec.vocab_size:
            raise ApiError(
                400,
                f"token {shown(token)} is not among the {codec.vocab_size} of the tokenizer.",
                "prompt",
            )
    return prompts


def _tools(request: ChatBody) -> frozenset[str]:
    """Return the names of functions that the model may call."""
    if request.tool_choice == "none":
        return frozenset()
    return frozenset(tool.function.name for tool in request.tools or ())


def _encoded(encode: Callable[[str], list[int]], text: str, longest: int) -> list[int]:
    """Return the ids of a text.

    Raises:
        ApiError: If the begin of the text alone is too long. Megabytes would take many seconds.
    """
    begin = text[: _CHARACTERS * longest]
    if len(begin) < len(text) and (number := len(encode(begin))) > longest + _MARGIN:
        raise ApiError(
            400,
            f"a prompt of more than {number} tokens is longer than the {longest} tokens of this "
            "server. Shorten the prompt.",
            "prompt",
        )
    return encode(text)


def _conversation(request: ChatBody, body: Mapping[str, Any], codec: Codec) -> str:
    """Return a conversation as a text by the chat template.

    Raises:
        ApiError: If the template refuses the messages, or does not render tools or calls.
    """
    messages = [
        _message(message, given)
        for message, given in zip(request.messages, body["messages"], strict=True)
    ]
    # As given: templates render the order of keys.
    tools = None if request.tool_choice == "none" else body.get("tools")
    variables = request.chat_template_kwargs or {}
    try:
        text = codec.chat_text(messages, tools=tools, variables=variables)
        if tools and text == codec.chat_text(messages, variables=variables):
            raise ApiError(
                400,
                f"the chat template of {codec.name} does not render tools, so the model would not "
                "see them. Leave tools out, or describe them in a system message.",
                "tools",
            )
        without = [_without_calls(message) for message in messages]
        if without != messages and text == codec.chat_text(
            without, tools=tools, variables=variables
        ):
            raise ApiError(
                400,
                f"the chat template of {codec.name} does not render tool_calls. Write calls as "
                "content.",
                "messages",
            )
    except ConfigError as error:
        raise ApiError(400, str(error), "messages") from error
    return text


def _chat_ids(text: str, codec: Codec, longest: int) -> list[int]:
    ids = _encoded(partial(codec.ids, special=False), text, longest)
    if not ids:
        message = f"the chat template of {codec.name} renders the messages as an empty text."
        raise ApiError(400, message, "messages")
    return ids


def _message(message: Message, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for templates, as in training data: without keys of the value null, content
    as text, arguments of calls as objects, and reasoning by its own key.
    """
    content = message.content
    if content is None and message.role not in ("assistant", "tool"):
        raise ApiError(
            400, f"a message of the role {shown(message.role)} has no content.", "messages"
        )
    if isinstance(content, list):
        content = "".join(part.text for part in content if isinstance(part, Part))
    fields: dict[str, Any] = {"role": message.role, "content": content or ""}
    if message.role != ASSISTANT and (key := next(filter(given.get, REASONING), None)):
        raise ApiError(
            400,
            f"a message of the role {shown(message.role)} has {key}, and only an answer of the "
            "assistant has reasoning. Leave it out.",
            "messages",
        )
    for name in ("name", "tool_call_id", *REASONING):
        if given.get(name) is not None:
            fields[name] = given[name]
    if message.tool_calls:
        fields["tool_calls"] = [
            {**call, "function": _function_of(call["function"])} for call in given["tool_calls"]
        ]
    return fields


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _function_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the function of a call with the arguments as an object. OpenAI's clients send JSON
    text, and templates write JSON themselves.
    """
    arguments = given.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            loaded = json.loads(arguments)
        except (ValueError, RecursionError):
            loaded = None
        arguments = loaded if isinstance(loaded, dict) else arguments
    return {**given, "arguments": arguments}


def _logprobs(request: Body) -> bool:
    for key in ("top_logprobs", "logprobs"):
        value = getattr(request, key)
        if value not in (None, 0, 1):
            raise ApiError(
                400,
                f"{key}={shown(value)}; this server has the best token only: 0 or 1.",
                key,
            )
    # In completions 0 is a number of further tokens. In chats logprobs is a switch.
    return request.logprobs is not None and request.logprobs is not False


def _sampling(request: Body, most: int) -> Sampling:
    stop: Sequence[str] = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > _MOST_STOPS or not all(stop):
        raise ApiError(400, f"stop has to be a text, or a list of up to {_MOST_STOPS}.", "stop")
    try:
        return Sampling(
            max_new_tokens=most,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=None if request.top_k in (None, 0, -1) else request.top_k,
            seed=secrets.randbits(48) if request.seed is None else request.seed % _SEEDS,
            stop=tuple(stop),
        )
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
