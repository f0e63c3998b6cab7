"""Images and sounds in chats of the OpenAI API: data URLs and base64 alone. Nothing is fetched, and
no file is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_lightning.data.images.image_prompts import Check, ImagePrompts, Prompt
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.inference.serving.api_models import (
    ApiError,
    ChatBody,
    ImagePart,
    SoundPart,
    shown,
)

_RIFF = "UklGR"  # the first letters of a WAV file, in base64


def chat_with_images(
    request: ChatBody, body: Mapping[str, Any], images: ImagePrompts | None, check: Check
) -> Prompt:
    """Return the prompt of a chat with images or sounds.

    Args:
        request: The request.
        body: The same as JSON.
        images: Makes prompts with images. None: the model reads text alone.
        check: Raises if the prompt is too long, before any pixel is decoded.

    Raises:
        ApiError: If the model reads text alone, or an image or a message cannot be used.
    """
    if images is None:
        raise ApiError(
            400,
            "the model of this server reads text alone. Leave images and sounds out.",
            "messages",
        )
    for message in request.messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, SoundPart) and not part.input_audio.data.startswith(_RIFF):
                raise ApiError(
                    400,
                    f"input_audio of the format {shown(part.input_audio.format)} is no WAV file. "
                    "Send a WAV file in base64.",
                    "messages",
                )
            if not isinstance(part, ImagePart):
                continue
            if not part.image_url.url.lower().startswith("data:image/"):
                raise ApiError(
                    400,
                    f"image_url is {shown(part.image_url.url)}, and this server fetches nothing "
                    "and opens no file. Send the image as data:image/png;base64,….",
                    "messages",
                )
    tools = None if request.tool_choice == "none" else body.get("tools")
    try:
        return images.of_messages(
            "the request",
            [_without_nulls(message) for message in body["messages"]],
            check=check,
            tools=tools or None,
            chat_template_kwargs=request.chat_template_kwargs,
        )
    except (ConfigError, DataError) as error:
        raise ApiError(400, str(error), "messages") from error


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}
