"""Conversations as text, and the characters of it that a model learns to write.

A template that marks its answers (``{% generation %}``) says which characters count. Without marks,
an answer is what ``render(messages[:i + 1])`` adds to ``render(messages[:i])`` with the generation
prompt. Both must be beginnings of the full text; many templates render a message in another way
once more messages follow, and a difference of lengths would then name the wrong characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_lightning.data.chat import ASSISTANT, REASONING, THOUGHT, Chat
from megatron_lightning.errors import ConfigError, DataError

Span = tuple[int, int]
TrainOn = Literal["answers", "last"]
Reasoning = Literal["keep", "drop", "mask"]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WAY_OUT = (
    "set split_turns=True, with which every answer is a sample of its own, or a chat_template that "
    "marks answers with {% generation %}"
)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What of a conversation is trained."""

    train_on: TrainOn = "answers"
    """All answers of a conversation, or the last one."""
    split_turns: bool = False
    """Whether every answer is a sample of its own, behind the conversation before it."""
    reasoning: Reasoning = "keep"
    """``keep``: the template gets the reasoning of answers; ``drop``: it does not; ``mask``: it
    does, and reasoning has no loss."""

    def __post_init__(self) -> None:
        for name, values in (("train_on", TrainOn), ("reasoning", Reasoning)):
            if getattr(self, name) not in get_args(values):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}; must be one of {', '.join(get_args(values))}"
                )


@dataclass(frozen=True)
class Rendered:
    """Text of a sample."""

    where: str
    text: str
    spans: Sequence[Span]
    """Begin and end of every piece that counts in the loss, in characters."""
    has_special_tokens: bool = True
    """Whether the text has its special tokens, as templates write them."""


class ChatTemplate:
    """A Jinja template, run in the sandbox of ``transformers``.

    Args:
        source: The template, or the path of a file with it; of several, by name.
        special_tokens: Text of the tokenizer's special tokens, such as ``eos_token``.
        options: Further values for the template, such as ``enable_thinking``.

    Raises:
        ConfigError: If it cannot be compiled.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in self.sources:
            raise ConfigError(
                f"the tokenizer has the chat templates {sorted(self.sources)} and none is named "
                "default; set chat_template to one of them"
            )
        self._values = {**special_tokens, **(options or {})}
        self._end: str = str(special_tokens.get("eos_token") or "")
        for text in self.sources.values():
            _compile(text)

    @classmethod
    def load(
        cls,
        source: str,
        special_tokens: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
    ) -> ChatTemplate:
        """Return the template that ``source`` is, or that the file ``source`` holds."""
        is_path = "{" not in source and "\n" not in source
        if is_path and not Path(source).is_file():
            raise ConfigError(
                f"chat_template={source!r} is neither a file nor a Jinja template; set it to one"
            )
        return cls(Path(source).read_text() if is_path else source, special_tokens, options)

    @property
    def identity(self) -> dict[str, Any]:
        """All that the text of a conversation depends on."""
        return {"templates": self.sources, "values": {k: str(v) for k, v in self._values.items()}}

    def samples(self, chat: Chat, options: ChatOptions) -> Iterator[Rendered]:
        """Yield the samples of a conversation: one, or with ``split_turns`` one for every answer
        that counts. A conversation without an answer that counts has none.

        Raises:
            DataError: If the template refuses the conversation, or does not say which characters
                an answer has; naming the message.
        """
        answers = sorted(chat.trained)[-1 if options.train_on == "last" else 0 :]
        if not answers:
            return
        messages = [_with_reasoning(message, options.reasoning) for message in chat.messages]
        view = _View(self, chat, *self._readable(chat, messages))
        if options.split_turns:
            for answer in answers:
                text, spans = view.split_turn(answer)
                yield view.rendered(text, spans, options.reasoning)
        else:
            text, spans = view.answers(answers)
            yield view.rendered(text, spans, options.reasoning)

    def _readable(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], tuple[str, list[Span]]]:
        """Return the messages in the form whose content the template writes, and what it writes:
        content as text, or as a list of parts, which templates of models with images expect.

        Raises:
            DataError: If it writes neither.
        """
        full = self.render(chat, messages)
        missing = _unwritten(messages, full[0])
        if missing is None:
            return messages, full
        parts = [_in_parts(message) for message in messages]
        try:
            full = self.render(chat, parts)
        except DataError:
            full = "", []
        if _unwritten(messages, full[0]) is None:
            return parts, full
        raise DataError(
            f"{chat.where}: the chat template does not write the content of message {missing}, so "
            "that it would not be trained; set another chat_template"
        )

    def render(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the characters that the template marks.

        Args:
            chat: The conversation that they are of.
            messages: The messages.
            prompt: Whether the text ends as it does before an answer is generated.

        Raises:
            DataError: If the template refuses them.
        """
        from jinja2 import TemplateError

        template = self._template(chat)
        try:
            try:
                return self._rendered(template, chat, messages, prompt)
            except TypeError:  # a few templates add the arguments of calls to text
                return self._rendered(template, chat, _with_text_arguments(messages), prompt)
        except (TemplateError, TypeError, KeyError, ValueError, IndexError) as error:
            raise DataError(
                f"{chat.where}: the chat template does not take the first {len(messages)} messages "
                f"({type(error).__name__}: {error}); mend the row, or set another chat_template"
            ) from error

    def _rendered(
        self, template: str, chat: Chat, messages: Sequence[Mapping[str, Any]], prompt: bool
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = self.marks(chat)
        render: Any = render_jinja_template
        texts, spans = render(
            [list(messages)],
            tools=None if chat.tools is None else list(chat.tools),
            chat_template=template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **self._values,
        )
        return texts[0], [(begin, end) for begin, end in spans[0]] if marked else []

    def _template(self, chat: Chat) -> str:
        name = "tool_use" if chat.tools and "tool_use" in self.sources else "default"
        return self.sources[name]

    def marks(self, chat: Chat) -> bool:
        """Return whether the template marks the answers of a conversation."""
        return _MARKS.search(self._template(chat)) is not None

    def without_end(self, text: str) -> str:
        """Return ``text`` without an end-of-text token, which some templates write behind the last
        message only.
        """
        return text.removesuffix(self._end) if self._end else text


class _View:
    """One conversation through one template."""

    def __init__(
        self,
        template: ChatTemplate,
        chat: Chat,
        messages: Sequence[Mapping[str, Any]],
        full: tuple[str, list[Span]],
    ) -> None:
        self._template = template
        self._chat = chat
        self._messages = messages
        self._full = full

    def _render(self, stop: int, *, prompt: bool = False) -> tuple[str, list[Span]]:
        if stop == len(self._messages) and not prompt:
            return self._full
        if not stop and not prompt:
            return "", []
        return self._template.render(self._chat, self._messages[:stop], prompt=prompt)

    def answers(self, answers: Sequence[int]) -> tuple[str, list[Span]]:
        """Return the full text, and the characters of some answers."""
        full, marked = self._render(len(self._messages))
        if self._template.marks(self._chat):
            return full, self._marked(answers, marked)
        return full, [self._added(full, answer) for answer in answers]

    def _marked(self, answers: Sequence[int], marked: list[Span]) -> list[Span]:
        """Return the marked spans of ``answers``: all, or those that came with each message."""
        everyone = [i for i, message in enumerate(self._messages) if message["role"] == ASSISTANT]
        if list(answers) == everyone:
            return marked
        numbers = [
            len(self._render(stop)[1]) for answer in answers for stop in (answer, answer + 1)
        ]
        if numbers != sorted(numbers):
            raise DataError(
                f"{self._chat.where}: the chat template marks fewer answers of a longer "
                f"conversation, so that it is not known which one is whose; {_WAY_OUT}"
            )
        ranges = zip(numbers[::2], numbers[1::2], strict=True)
        return [span for begin, end in ranges for span in marked[begin:end]]

    def _added(self, full: str, answer: int) -> Span:
        """Return the characters that the message ``answer`` adds behind its generation prompt."""
        try:
            start, _ = self._render(answer, prompt=True)
            end, _ = self._render(answer + 1)
        except DataError as error:
            raise DataError(
                f"{self._chat.where}: which characters message {answer} has is not known, since "
                f"the chat template does not take the messages before it alone; {_WAY_OUT}. "
                f"{error}"
            ) from error
        if not full.startswith(end):
            end = self._template.without_end(end)
        if full.startswith(start) and full.startswith(end) and len(start) < len(end):
            return len(start), len(end)
        reason = (
            "renders otherwise once more messages follow"
            if full.startswith(start)
            else "does not begin with the generation prompt"
        )
        raise DataError(
            f"{self._chat.where}: message {answer} {reason}, so that the characters of the answer "
            f"are not known; {_WAY_OUT}"
        )

    def split_turn(self, answer: int) -> tuple[str, list[Span]]:
        """Return the conversation up to an answer as it is rendered alone, and its characters."""
        text, marked = self._render(answer + 1)
        start = self._begin(text, answer)
        if self._template.marks(self._chat):
            return text, [(max(begin, start), end) for begin, end in marked if end > start]
        return text, [(start, len(text))]

    def _begin(self, text: str, answer: int) -> int:
        """Return where an answer begins: behind the prompt that generation sees, if the text has
        it.
        """
        failed = None
        for prompt in (True, False):
            try:
                before, _ = self._render(answer, prompt=prompt)
            except DataError as error:
                failed = error
                continue
            if text.startswith(before) and len(before) < len(text):
                return len(before)
        raise DataError(
            f"{self._chat.where}: the messages before message {answer} render otherwise alone, so "
            "that the characters of the answer are not known; set a chat_template that marks "
            "answers with {% generation %}"
        ) from failed

    def rendered(self, text: str, spans: Sequence[Span], reasoning: Reasoning) -> Rendered:
        """Return a sample, without the reasoning's characters if those have no loss.

        Raises:
            DataError: If no character is trained.
        """
        if reasoning == "mask":
            spans = _without(spans, self._reasoning(text, spans))
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            raise DataError(
                f"{self._chat.where}: the chat template leaves no character of the answers to "
                "train; mend the row, or set another chat_template"
            )
        return Rendered(self._chat.where, text, spans)

    def _reasoning(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """Return where the answers in ``spans`` have their reasoning."""
        thoughts = {
            str(message[key]).strip()
            for message in self._messages
            for key in REASONING
            if message["role"] == ASSISTANT and message.get(key)
        }
        found = []
        for begin, end in spans:
            found += [
                (begin + match.start(), begin + match.end())
                for match in THOUGHT.finditer(text[begin:end])
            ]
            for thought in thoughts - {""}:
                at = text.find(thought, begin, end)
                found += [(at, at + len(thought))] if at >= 0 else []
            # The generation prompt may have opened the thought.
            closed = text.find("</think>", begin, end)
            if closed >= 0 and "<think>" not in text[begin:closed]:
                found.append((begin, closed + len("</think>")))
        return found


def _compile(template: str) -> None:
    from jinja2 import TemplateError

    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise ConfigError(
            "chat templates need the package transformers, which is not installed; `pip install "
            "'megatron_lightning[finetune]'`"
        ) from error
    try:
        render_jinja_template([], chat_template=template)
    except TemplateError as error:
        raise ConfigError(
            f"chat_template is no Jinja template ({error}); set it to the text of one, or to the "
            "path of a file"
        ) from error


def _with_reasoning(message: Mapping[str, Any], reasoning: Reasoning) -> Mapping[str, Any]:
    if reasoning != "drop" or message["role"] != ASSISTANT:
        return message
    kept = {key: value for key, value in message.items() if key not in REASONING}
    return {**kept, "content": THOUGHT.sub("", str(kept.get("content") or ""))}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": [{"type": "text", "text": message.get("content") or ""}]}


def _unwritten(messages: Sequence[Mapping[str, Any]], text: str) -> int | None:
    """Return the first question or answer whose content is not in ``text``, but for reasoning."""
    for number, message in enumerate(messages):
        content = THOUGHT.sub("", str(message.get("content") or "")).strip()
        if message["role"] in ("user", ASSISTANT) and content not in text:
            return number
    return None


def _with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose tool calls have their arguments as JSON text."""

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


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Return ``spans`` without the characters in ``holes``."""
    for hole_begin, hole_end in holes:
        spans = [
            piece
            for begin, end in spans
            for piece in ((begin, min(end, hole_begin)), (max(begin, hole_end), end))
            if piece[0] < piece[1]
        ]
    return list(spans)
