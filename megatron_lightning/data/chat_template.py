"""Conversations as text, with the trained characters.

A template with marked answers (``{% generation %}``) names the trained characters. Without marks,
an answer is the difference between ``render(messages[:i + 1])`` and ``render(messages[:i])`` with
the generation prompt. Both renderings must be prefixes of the full text. Many templates render a
message in another way as soon as more messages follow, and a difference of lengths would then name
the wrong characters.
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
    """The trained part of a conversation."""

    train_on: TrainOn = "answers"
    """All answers of a conversation, or only the last answer."""
    split_turns: bool = False
    """Whether every answer becomes a separate sample, behind the earlier messages."""
    reasoning: Reasoning = "keep"
    """``keep``: the template gets the reasoning of answers. ``drop``: the template does not.
    ``mask``: the template does, and reasoning has no loss."""

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
    """Start and end of every trained piece, in characters."""
    has_special_tokens: bool = True
    """Whether the text contains the special tokens, as written by templates."""
    ends: Sequence[int] = ()
    """End of every answer, in characters. Empty if the template marks the trained characters."""


class ChatTemplate:
    """A Jinja template, run in the sandbox of ``transformers``.

    Args:
        source: The template, or the path of a template file. Several templates are given by name.
        special_tokens: Text of the tokenizer's special tokens, such as ``eos_token``.
        options: Further values for the template, such as ``enable_thinking``.

    Raises:
        ConfigError: If the template cannot be compiled.
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
        """Return the template in ``source``, or in the file named ``source``."""
        is_path = "{" not in source and "\n" not in source
        if is_path and not Path(source).is_file():
            raise ConfigError(
                f"chat_template={source!r} is neither a file nor a Jinja template; set it to one"
            )
        return cls(Path(source).read_text() if is_path else source, special_tokens, options)

    @property
    def identity(self) -> dict[str, Any]:
        """All inputs to the text of a conversation, beside the conversation."""
        # The text "False" is true in a template, and False is not.
        values = {name: json.dumps(value, default=str) for name, value in self._values.items()}
        return {"templates": self.sources, "values": values}

    def samples(self, chat: Chat, options: ChatOptions) -> Iterator[Rendered]:
        """Yield the samples of a conversation: a single sample, or with ``split_turns`` a sample
        for every trained answer. A conversation without a trained answer has none.

        Raises:
            DataError: If the template refuses the conversation, or does not determine the
                characters of an answer. The error names the message.
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
        """Return the messages in a form readable for the template, and the rendered text. The
        content is text, or a list of parts as expected by templates of models with images.

        Raises:
            DataError: If the template writes neither form.
        """
        refusals, missing = [], None
        for form in (messages, [_in_parts(message) for message in messages]):
            try:
                rendered = self.render(chat, form)
            except DataError as error:
                refusals.append(error)
                continue
            fault = _unwritten(messages, rendered[0]) or self._ignored_calls(chat, form, rendered)
            if fault is None:
                return form, rendered
            missing = missing or fault
        if missing is None:
            raise refusals[0]
        raise DataError(
            f"{chat.where}: the chat template does not write {missing}, so that it would not be "
            "trained; set another chat_template"
        )

    def _ignored_calls(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], rendered: tuple[str, list[Span]]
    ) -> str | None:
        """Return the first tool calls, if the template writes the same text without any calls."""
        number = next((n for n, message in enumerate(messages) if message.get("tool_calls")), None)
        if number is None:
            return None
        without = [{k: v for k, v in one.items() if k != "tool_calls"} for one in messages]
        try:
            is_same = self.render(chat, without) == rendered
        except DataError:  # the template asks for the calls
            return None
        return f"the tool calls of message {number}" if is_same else None

    def render(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the characters marked by the template.

        Args:
            chat: The conversation of the messages.
            messages: The messages.
            prompt: Whether the text ends with the generation prompt.

        Raises:
            DataError: If the template refuses the messages.
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
        """Return ``text`` without an end-of-text token. Several templates write the token only
        behind the last message.
        """
        return text.removesuffix(self._end) if self._end else text


class _View:
    """A conversation rendered by a template."""

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
        """Return the full text, and the characters of the given answers."""
        full_text, marked = self._render(len(self._messages))
        if self._template.marks(self._chat):
            return full_text, self._marked(answers, marked)
        return full_text, [self._added(full_text, answer) for answer in answers]

    def _marked(self, answers: Sequence[int], marked: list[Span]) -> list[Span]:
        """Return the marked spans of ``answers``: all spans, or the spans added by each message."""
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
        """Return the characters added by the message ``answer`` behind the generation prompt."""
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
        """Return the conversation up to an answer, rendered alone, and the characters of the
        answer.
        """
        text, marked = self._render(answer + 1)
        start = self._begin(text, answer)
        if self._template.marks(self._chat):
            return text, [(max(begin, start), end) for begin, end in marked if end > start]
        return text, [(start, len(text))]

    def _begin(self, text: str, answer: int) -> int:
        """Return the start of an answer: behind the generation prompt, if the text contains the
        prompt.
        """
        failed = None
        for prompt in (True, False):
            try:
                text_before, _ = self._render(answer, prompt=prompt)
            except DataError as error:
                failed = error
                continue
            if text.startswith(text_before) and len(text_before) < len(text):
                return len(text_before)
        raise DataError(
            f"{self._chat.where}: the messages before message {answer} render otherwise alone, so "
            "that the characters of the answer are not known; set a chat_template that marks "
            "answers with {% generation %}"
        ) from failed

    def rendered(self, text: str, spans: Sequence[Span], reasoning: Reasoning) -> Rendered:
        """Return a sample. Leave the reasoning's characters out of the spans if reasoning has no
        loss.

        Raises:
            DataError: If no character is trained.
        """
        ends = [] if self._template.marks(self._chat) else [end for _, end in spans]
        if reasoning == "mask":
            spans = _without(spans, self._reasoning(text, spans))
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            raise DataError(
                f"{self._chat.where}: the chat template leaves no character of the answers to "
                "train; mend the row, or set another chat_template"
            )
        return Rendered(self._chat.where, text, spans, ends=ends)

    def _reasoning(self, text: str, spans: Sequence[Span]) -> list[Span]:
        """Return the spans of the reasoning in the answers of ``spans``."""
        thoughts = {
            str(message[key]).strip()
            for message in self._messages
            for key in REASONING
            if message["role"] == ASSISTANT and message.get(key)
        }
        texts = []
        for begin, end in spans:
            texts += [
                (begin + match.start(), begin + match.end())
                for match in THOUGHT.finditer(text[begin:end])
            ]
            for thought in thoughts - {""}:
                at = text.find(thought, begin, end)
                texts += [(at, at + len(thought))] if at >= 0 else []
            # The generation prompt may have opened the thought.
            closed = text.find("</think>", begin, end)
            if closed >= 0 and "<think>" not in text[begin:closed]:
                texts.append((begin, closed + len("</think>")))
        return texts


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
    fields = {key: value for key, value in message.items() if key not in REASONING}
    return {**fields, "content": THOUGHT.sub("", str(fields.get("content") or ""))}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": [{"type": "text", "text": message.get("content") or ""}]}


def _unwritten(messages: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """Return the first content of a question or an answer missing from ``text``, apart from
    reasoning.
    """
    for number, message in enumerate(messages):
        content = THOUGHT.sub("", str(message.get("content") or "")).strip()
        if message["role"] in ("user", ASSISTANT) and content not in text:
            return f"the content of message {number}"
    return None


def _with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
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
