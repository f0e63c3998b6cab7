"""Bodies of the OpenAI API as strict models.

Unknown keys without an effect are accepted: null, empty lists, objects and texts, and the values
of :data:`_NEUTRAL`, as in the ``model_dump()`` of a client; in messages and other objects inside
false and 0 as well. In the body itself these may be a mistyped ``temperature=0``, or turn off what
is on here. Other unknown keys are refused by name.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from megatron_lightning.optional import missing

try:
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
except ImportError as error:
    raise missing("pydantic", "the server", error=error) from error

_UNSUPPORTED = (
    "is not supported by this server. Leave it out, or serve the exported folder with vLLM or "
    "SGLang."
)
# Name of an unsupported option -> values without an effect.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": (),
    "suffix": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": (),
    "reasoning_effort": (),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_ANY = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Names with an effect on no answer."""
_Model = TypeVar("_Model", bound="Strict")


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


class Strict(BaseModel):
    """An object without conversions of types. ``description`` of a field completes the message of
    an error: "… has to be DESCRIPTION".
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(Strict):
    """Common part of completions and chats."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = Field(None, ge=1, description="1 or more")
    temperature: float | None = Field(None, description="a number")
    top_p: float | None = Field(None, description="a number")
    top_k: int | None = Field(None, description="an integer")
    seed: int | None = Field(None, description="an integer")
    stop: str | list[str] | None = Field(None, description="a text, or a list of up to 4")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description="an object with include_usage")
    top_logprobs: int | None = Field(None, description="0 or 1")


class CompletionBody(_Body):
    """Body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]] = Field(
        description="a text, token ids, or a list of these, and not empty"
    )
    echo: bool | None = Field(None, description="true or false")
    logprobs: bool | int | None = Field(None, description="0 or 1")
    best_of: int | None = None


class Part(Strict):
    """Part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Address of an image."""

    url: str
    detail: str | None = None


class ImagePart(Strict):
    """Image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Sound(Strict):
    """A sound in base64."""

    data: str
    format: str


class SoundPart(Strict):
    """Sound in a message."""

    type: Literal["input_audio"]
    input_audio: Sound


class CalledFunction(Strict):
    """Function of a call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class Call(Strict):
    """Call in an answer of the model."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Strict):
    """Message of a conversation."""

    role: str
    content: str | list[Part | ImagePart | SoundPart] | None = Field(
        None,
        description="text, or a list of parts of text, images (image_url) and sounds (input_audio)",
    )
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class Function(Strict):
    """Function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function


class ChatBody(_Body):
    """Body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(
        min_length=1, description="a list of messages with role and content, and not empty"
    )
    logprobs: bool | None = Field(None, description="true or false")
    tools: list[Tool] | None = Field(None, description="a list of tools of the type function")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="none or auto")
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="an object with variables of the chat template"
    )


def validated(kind: type[_Model], body: Any) -> _Model:
    """Return a body as a model.

    Raises:
        ApiError: If the body is no object, a value is of another type, or a key is unknown.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {shown(body)}; it has to be a JSON object.")
    try:
        model = kind.model_validate(body)
    except ValidationError as error:
        raise _error_of(kind, body, error) from error
    for place, value in _unknown_of(model):
        raise ApiError(
            400,
            f"{place}={shown(value)} {_UNSUPPORTED}"
            if place in _NEUTRAL
            else f"there is no parameter {shown(place)}. Leave it out.",
            place[:200],
        )
    return model


def shown(value: Any) -> str:
    """Return a value for a message: short, whatever a client has sent."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    return short.repr(value)


def _unknown_of(model: Strict, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield place and value of unknown keys with an effect, of the objects inside as well."""
    off = (False,) if place else ()  # equals 0
    for name, value in (model.model_extra or {}).items():
        if name not in _ANY and value not in (*_EMPTY, *off, *_NEUTRAL.get(name, ())):
            yield f"{place}{name}", value
    for name in type(model).model_fields:
        value = getattr(model, name)
        items = enumerate(value) if isinstance(value, list) else [("", value)]
        for index, item in items:
            # Templates render all keys of a function.
            if isinstance(item, Strict) and not isinstance(item, Function):
                inside = f"{name}." if index == "" else f"{name}.{index}."
                yield from _unknown_of(item, f"{place}{inside}")


def _error_of(kind: type[Strict], body: dict[str, Any], error: ValidationError) -> ApiError:
    """Return the innermost problem, by the name of its place in the body."""
    problem = max(
        error.errors(include_url=False, include_context=False), key=lambda one: len(one["loc"])
    )
    path: list[str] = []
    value: Any = body
    for key in problem["loc"]:  # with names of the types of a union, which are no keys
        is_index = isinstance(value, list) and isinstance(key, int)
        if is_index or (isinstance(value, dict) and key in value):
            value = value[key]
        elif problem["type"] == "missing" and key == problem["loc"][-1]:
            value = None
        else:
            continue
        path.append(str(key))
    field = kind.model_fields.get(path[0]) if path else None
    is_inside = len(path) > 1 and path[0] in ("messages", "tools")
    if problem["type"] == "missing":
        message = f"{'.'.join(path)} is missing."
    elif field is not None and field.description and not is_inside:
        message = f"{path[0]} is {shown(body[path[0]])}; it has to be {field.description}."
    else:
        message = f"{'.'.join(path)} is {shown(value)}: {problem['msg']}."
    return ApiError(400, message, path[0] if path else None)
