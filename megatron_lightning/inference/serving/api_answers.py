"""Answers of the OpenAI API: complete answers, and pieces of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.inference.commands.text_codec import Codec
from megatron_lightning.inference.engine.continuation import final_text, text_so_far
from megatron_lightning.inference.serving.api_logprobs import (
    TokenPlaces,
    name_of,
    number_of,
    token_of,
)
from megatron_lightning.inference.serving.api_requests import ApiRequest
from megatron_lightning.inference.serving.tool_calls import ToolCall, parse_calls, place_of_calls


@dataclass
class Written:
    """Tokens and scores of a request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[tuple[int, float]] = field(default_factory=list)
    reason: str | None = None


@dataclass
class _Sent:
    """Part of a text already sent by a stream."""

    text: str = ""
    num_tokens: int = 0
    is_begun: bool = False


class Answer:
    """Makes the answers to a request.

    Args:
        request: The request.
        name: Name of the model.
        codec: The tokenizer.
    """

    def __init__(self, request: ApiRequest, name: str, codec: Codec) -> None:
        self._request = request
        self._codec = codec
        self._sent = [_Sent() for _ in range(request.num_texts)]
        kind = "chat.completion" if request.is_chat else "text_completion"
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": name,
        }

    def whole(self, prompts: Sequence[Written], texts: Sequence[Written]) -> dict[str, Any]:
        """Return the whole answer.

        Args:
            prompts: Scores of each prompt behind the first token. Empty: scores are not wanted.
            texts: The written texts.
        """
        number = self._request.num_choices
        choices = [
            self._choice(index, prompts[index // number] if prompts else None, text)
            for index, text in enumerate(texts)
        ]
        return {**self._head, "choices": choices, "usage": self.usage(texts)}

    def usage(self, texts: Sequence[Written]) -> dict[str, int]:
        """Return how many tokens were read and written."""
        num_prompt = sum(map(len, self._request.prompts))
        num_new = sum(len(text.tokens) for text in texts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }

    def _choice(self, index: int, prompt: Written | None, text: Written) -> dict[str, Any]:
        content = self._text(index, text)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": text.reason or "length",
            "logprobs": self._logprobs(index, prompt, text, 0, None),
        }
        if not self._request.is_chat:
            return {**choice, "text": content}
        content, calls = self._calls(content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call(call) for call in calls]}
            choice["finish_reason"] = "tool_calls"
        return {**choice, "message": message}

    def _text(self, index: int, text: Written) -> str:
        """Return the final part of a text, with an echo of the prompt."""
        prompt, stop = self._request.prompt(index), self._request.sampling.stop
        if text.reason is None:
            content = text_so_far(self._codec.decode, self._codec, prompt, text.tokens, stop)
        else:
            content = final_text(self._codec.decode, prompt, text.tokens, stop)
        return self._codec.decode(prompt) + content if self._request.echo else content

    def _calls(self, content: str) -> tuple[str, list[ToolCall]]:
        if not self._request.tools:
            return content, []
        beside, calls = parse_calls(content, self._request.tools)
        return beside, calls[: self._request.most_calls]

    def _logprobs(
        self, index: int, prompt: Written | None, text: Written, first: int, end: int | None
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens ``first`` to ``end`` - 1 of a text. None: not
        wanted.

        In completions the tokens of an echo count. The first token of a prompt has no
        log-probability.
        """
        request = self._request
        if not request.logprobs:
            return None
        if request.is_chat:
            return self._chat_logprobs(text, first, end)
        tokens, values, best = list(text.tokens), list(text.logprobs), list(text.best)
        numbers: list[float | None] = list(values)
        tops: list[tuple[int, float] | None] = list(best)
        content = self._text(index, text)
        if request.echo:
            tokens = request.prompt(index) + tokens
            numbers = [None, *(prompt.logprobs if prompt else ()), *numbers]
            tops = [None, *(prompt.best if prompt else ()), *tops]
        places = TokenPlaces(self._codec)
        places.extend(tokens, content)
        span = slice(first, end)
        return {
            "tokens": places.names[span],
            "token_logprobs": [one and number_of(one) for one in numbers[span]],
            "top_logprobs": [
                top and {self._top_name(token, name, top[0]): number_of(top[1])}
                for token, name, top in zip(tokens, places.names, tops, strict=True)
            ][span],
            "text_offset": places.offsets[:-1][span],
        }

    def _top_name(self, token: int, name: str, top: int) -> str:
        # Clients compare the names of a token and the best token.
        return name if token == top else name_of(self._codec, top)

    def _chat_logprobs(self, text: Written, first: int, end: int | None) -> dict[str, Any]:
        content = []
        rows = zip(text.tokens, text.logprobs, text.best, strict=True)
        for token, logprob, (best, value) in list(rows)[first:end]:
            top = {**token_of(self._codec, best), "logprob": number_of(value)}
            own = {**token_of(self._codec, token), "logprob": number_of(logprob)}
            content.append({**own, "top_logprobs": [top]})
        return {"content": content, "refusal": None}

    def piece(self, index: int, prompt: Written | None, text: Written) -> dict[str, Any] | None:
        """Return the next piece of a text in a stream. None: there is nothing to send yet.

        Args:
            index: Number of the text.
            prompt: Scores of the prompt behind the first token. None: scores are not wanted.
            text: The text so far.
        """
        sent, content, calls = self._sent[index], self._text(index, text), list[ToolCall]()
        is_over = text.reason is not None
        if is_over:
            content, calls = self._calls(content)
        elif self._request.tools:
            content = content[: place_of_calls(content)]
        if not is_over and len(content) <= len(sent.text):
            return None
        new, is_first = content[len(sent.text) :], not sent.is_begun
        end = None if is_over else self._num_sendable(index, text, content)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": "tool_calls" if calls else text.reason,
            "logprobs": self._logprobs(index, prompt, text, sent.num_tokens, end),
        }
        if self._request.is_chat:
            delta: dict[str, Any] = {"role": "assistant"} if is_first else {}
            if new or (is_first and not calls):
                delta["content"] = new
            if calls:
                delta["tool_calls"] = [
                    {"index": place, **_call(call)} for place, call in enumerate(calls)
                ]
            choice["delta"] = delta
        else:
            choice["text"] = new
        sent.text, sent.is_begun = content, True
        sent.num_tokens = sent.num_tokens if end is None else end
        return {**self._pieces_head, "choices": [choice]}

    def _num_sendable(self, index: int, text: Written, content: str) -> int:
        """Return the number of tokens inside of the final part of a text."""
        if not self._request.logprobs:
            return 0
        echoed = self._request.prompt(index) if self._request.echo else []
        places = TokenPlaces(self._codec)
        places.extend([*echoed, *text.tokens], content)
        return places.num_within(len(content))

    def last_piece(self, texts: Sequence[Written]) -> dict[str, Any]:
        """Return the piece with the token counts."""
        return {**self._pieces_head, "choices": [], "usage": self.usage(texts)}

    @property
    def _pieces_head(self) -> dict[str, Any]:
        suffix = ".chunk" if self._request.is_chat else ""
        return {**self._head, "object": f"{self._head['object']}{suffix}"}


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call with an id. Some templates take ids of nine letters and digits alone."""
    return {
        "id": uuid.uuid4().hex[:9],
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
