"""Answers of the OpenAI API: complete answers, and pieces of streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lightning.inference.api_requests import ApiRequest
from megatron_lightning.inference.continuation import final_text, text_so_far
from megatron_lightning.inference.text import Codec


@dataclass
class Written:
    """Tokens and scores of a request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[tuple[int, float]] = field(default_factory=list)
    reason: str | None = None


def text_of(written: Written, prompt: Sequence[int], stop: Sequence[str], codec: Codec) -> str:
    """Return the final part of the text: further tokens cannot change it."""
    if written.reason is None:
        return text_so_far(codec.decode, codec, prompt, written.tokens, stop)
    return final_text(codec.decode, prompt, written.tokens, stop)


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
        kind = "chat.completion" if request.is_chat else "text_completion"
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": name,
        }

    def whole(self, prompts: Sequence[Written | None], texts: Sequence[Written]) -> dict[str, Any]:
        """Return the whole answer.

        Args:
            prompts: Scores of each prompt behind the first token. None: scores are not wanted.
            texts: The written texts.
        """
        choices = [
            self._choice(index, prompt, text)
            for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
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
        request = self._request
        content = text_of(text, request.prompts[index], request.sampling.stop, self._codec)
        if request.echo:
            content = self._codec.decode(request.prompts[index]) + content
        choice: dict[str, Any] = {"index": index, "finish_reason": text.reason or "length"}
        if request.is_chat:
            choice["message"] = {"role": "assistant", "content": content}
            choice["logprobs"] = self._chat_logprobs(text) if request.logprobs else None
        else:
            choice["text"] = content
            choice["logprobs"] = self._logprobs(index, prompt, text) if request.logprobs else None
        return choice

    def _logprobs(self, index: int, prompt: Written | None, text: Written) -> dict[str, Any]:
        """Return the lists of a completion. The first token of a prompt has no log-probability."""
        tokens, values, best = list(text.tokens), list(text.logprobs), list(text.best)
        numbers: list[float | None] = list(values)
        tops: list[tuple[int, float] | None] = list(best)
        if self._request.echo:
            tokens = self._request.prompts[index] + tokens
            numbers = [None, *(prompt.logprobs if prompt else ()), *numbers]
            tops = [None, *(prompt.best if prompt else ()), *tops]
        names = [self._codec.text_of(token) for token in tokens]
        offsets = [0]
        for name in names[:-1]:
            offsets.append(offsets[-1] + len(name))
        return {
            "tokens": names,
            "token_logprobs": numbers,
            "top_logprobs": [top and {self._codec.text_of(top[0]): top[1]} for top in tops],
            "text_offset": offsets,
        }

    def _chat_logprobs(self, text: Written) -> dict[str, Any]:
        content = []
        for token, logprob, (best, value) in zip(
            text.tokens, text.logprobs, text.best, strict=True
        ):
            top = {**self._token(best), "logprob": value}
            content.append({**self._token(token), "logprob": logprob, "top_logprobs": [top]})
        return {"content": content, "refusal": None}

    def _token(self, token: int) -> dict[str, Any]:
        name = self._codec.text_of(token)
        return {"token": name, "bytes": list(name.encode())}

    def piece(self, index: int, text: str, reason: str | None, *, first: bool) -> dict[str, Any]:
        """Return a piece of a stream."""
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._request.is_chat:
            delta = {"role": "assistant"} if first else {}
            choice["delta"] = {**delta, **({"content": text} if text or first else {})}
        else:
            choice["text"] = text
        return {**self._pieces_head, "choices": [choice]}

    def last_piece(self, texts: Sequence[Written]) -> dict[str, Any]:
        """Return the piece with the token counts."""
        return {**self._pieces_head, "choices": [], "usage": self.usage(texts)}

    @property
    def _pieces_head(self) -> dict[str, Any]:
        suffix = ".chunk" if self._request.is_chat else ""
        return {**self._head, "object": f"{self._head['object']}{suffix}"}
