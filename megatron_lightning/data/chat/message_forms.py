"""Forms in which messages reach a template, and what a rendering must hold of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lightning.data.chat.chat_view import Form, num_images_in
from megatron_lightning.data.chat.conversations import THOUGHT, Chat
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.images.image_parts import IMAGE
from megatron_lightning.errors import DataError


def as_it_is(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as it is."""
    return message


def in_parts(kind: str = "image") -> Form:
    """Return the form whose content is a list of parts: text, and images or sounds by ``kind``."""

    def form(message: Mapping[str, Any]) -> Mapping[str, Any]:
        first, *pieces = (message.get("content") or "").split(IMAGE)
        parts = [{"type": "text", "text": first}] if first or not pieces else []
        for piece in pieces:
            parts += [{"type": kind}, *([{"type": "text", "text": piece}] if piece else [])]
        return {**message, "content": parts}

    return form


def with_placeholders(placeholder: str) -> Form:
    """Return the form whose content is text with ``placeholder`` for every image."""

    def form(message: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**message, "content": (message.get("content") or "").replace(IMAGE, placeholder)}

    return form


def check_images(chat: Chat, messages: Sequence[Mapping[str, Any]]) -> None:
    """Check that the messages hold the images of the conversation.

    Raises:
        DataError: If an image has lost its place, or text has the character of one.
    """
    num_places = sum(map(num_images_in, messages))
    if chat.images and num_places != len(chat.images):
        raise DataError(
            f"{chat.where}: the messages have {num_places} places for {len(chat.images)} images: "
            "an image is inside of reasoning or of a message left out by drop_fields, or a text "
            "has the character U+FDD0, which stands for images here; leave it out"
        )


def unwritten(messages: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """Return the first content of a question or an answer missing from ``text``, apart from
    reasoning.
    """
    for number, message in enumerate(messages):
        content = THOUGHT.sub("", str(message.get("content") or "")).strip()
        pieces = [piece.strip() for piece in content.split(IMAGE)]
        if message["role"] in ("user", ASSISTANT) and any(one not in text for one in pieces):
            return f"the content of message {number}"
    return None


def unplaced(chat: Chat, text: str) -> str | None:
    """Return the images of a conversation, if ``text`` has fewer places."""
    num_places = text.count(chat.placeholder) if chat.placeholder else 0
    return f"{len(chat.images)} images" if num_places < len(chat.images) else None


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with the arguments of tool calls as JSON text."""

    def call_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = dict(call.get("function", call))
        if not isinstance(function.get("arguments"), str | None):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": function} if "function" in call else function

    return [
        {**message, "tool_calls": [call_of(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def begins_with_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the first message that is no system message is an answer."""
    roles = [message["role"] for message in messages if message["role"] != "system"]
    return roles[:1] == [ASSISTANT]
