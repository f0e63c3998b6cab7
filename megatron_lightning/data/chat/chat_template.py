"""Conversations as text, with the trained characters.

A template with marked answers (``{% generation %}``) names the trained characters, and so does the
table of public templates (:mod:`marked_templates`). Without marks,
an answer is the difference between ``render(messages[:i + 1])`` and ``render(messages[:i])`` with
the generation prompt. Both renderings must be prefixes of the full text. Many templates render a
message in another way as soon as more messages follow, and a difference of lengths would then name
the wrong characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from megatron_lightning.data.chat.chat_fields import (
    DROPPABLE,
    check_remains,
    inlined,
    without_reasoning,
)
from megatron_lightning.data.chat.chat_view import (
    ChatView,
    Form,
    Reasoning,
    Rendered,
    Span,
    UnwrittenField,
)
from megatron_lightning.data.chat.conversations import Chat
from megatron_lightning.data.chat.marked_templates import marks_of
from megatron_lightning.data.chat.message_forms import (
    as_it_is,
    begins_with_answer,
    check_images,
    in_parts,
    unplaced,
    unwritten,
    with_placeholders,
    with_text_arguments,
)
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.images.image_parts import IMAGE
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.optional import require

_STAND_IN = "\U000f0000"
"""A private character in the place of an answer."""
TrainOn = Literal["answers", "last"]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The trained part of a conversation."""

    train_on: TrainOn = "answers"
    """All answers of a conversation, or only the last answer."""
    split_turns: bool = False
    """Whether every answer becomes a separate sample, behind the earlier messages."""
    reasoning: Reasoning = "keep"
    """``keep``: the template gets the reasoning of answers. ``drop``: the template does not.
    ``mask``: the template does, and reasoning has no loss. ``inline``: the template gets the
    reasoning inside of the content, as ``<think>…</think>``."""
    drop_fields: tuple[str, ...] = ()
    """Fields of rows and messages left out by name."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.drop_fields if name not in DROPPABLE]
        if unknown:
            raise ConfigError(
                f"drop_fields has {unknown[0]!r}; the fields that can be left out are "
                f"{', '.join(DROPPABLE)}"
            )
        for name, values in (("train_on", TrainOn), ("reasoning", Reasoning)):
            if getattr(self, name) not in get_args(values):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}; must be one of {', '.join(get_args(values))}"
                )


class ChatTemplate:
    """A Jinja template, run in the sandbox of ``transformers``.

    Args:
        source: The template, or the path of a template file. Several templates are given by name.
        special_tokens: Text of the tokenizer's special tokens, such as ``eos_token``.
        options: Further values for the template, such as ``enable_thinking``.
        preamble: Jinja text before the template, such as a clock.

    Raises:
        ConfigError: If the template cannot be compiled.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        preamble: str = "",
    ) -> None:
        self._preamble = preamble
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in self.sources:
            raise ConfigError(
                f"the tokenizer has the chat templates {sorted(self.sources)} and none is named "
                "default; set chat_template to one of them"
            )
        self._values = {**special_tokens, **(options or {})}
        self._end: str = str(special_tokens.get("eos_token") or "")
        self._known = {name: marks_of(text) for name, text in self.sources.items()}
        self._training: ChatTemplate | None = None
        self.ends_at_header = False
        """Whether a header behind an answer of a marked template is trained."""
        if any(self._known.values()):
            self._training = self._marked(special_tokens, options)
        for text in self.sources.values():
            _compile(text)

    def _marked(
        self, special_tokens: Mapping[str, Any], options: Mapping[str, Any] | None
    ) -> ChatTemplate:
        """Return the template with marks of the table."""
        known = [marks for marks in self._known.values() if marks is not None]
        sources = {
            name: text if (marks := self._known[name]) is None else marks.applied(text)
            for name, text in self.sources.items()
        }
        marked = ChatTemplate(sources, special_tokens, options, self._preamble)
        marked.ends_at_header = any(marks.ends_at_header for marks in known)
        return marked

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
        preamble = {"preamble": self._preamble} if self._preamble else {}
        marked = {} if self._training is None else {"marked": self._training.sources}
        return {"templates": self.sources, "values": values, **preamble, **marked}

    def samples(self, chat: Chat, options: ChatOptions) -> Iterator[Rendered]:
        """Yield the samples of a conversation: a single sample, or with ``split_turns`` a sample
        for every trained answer. A conversation without a trained answer has none.

        Raises:
            DataError: If the template refuses the conversation, or does not determine the
                characters of an answer. The error names the message.
        """
        marks = self._known[self._name(chat)]
        if self._training is None or marks is None:
            yield from self._samples(chat, options)
        elif marks.keeps_text:
            yield from self._training._samples(chat, options)
        else:
            yield from self._shown(chat, options)

    def _shown(self, chat: Chat, options: ChatOptions) -> list[Rendered]:
        """Return the samples of the template, or of the marked template, which shows answers that
        the template hides once more messages follow.
        """
        try:
            return list(self._samples(chat, options))
        except DataError as hidden:
            # With split_turns the earlier messages are as in generation.
            if self._training is None or options.split_turns:
                raise
            if options.reasoning == "inline" and isinstance(hidden, UnwrittenField):
                raise DataError(
                    f"{hidden}. With reasoning=keep the marks for this public template keep it."
                ) from None
            try:
                samples = list(self._training._samples(chat, options))
            except DataError:
                raise hidden from None
        return [replace(sample, is_rewritten=True) for sample in samples]

    def _samples(self, chat: Chat, options: ChatOptions) -> Iterator[Rendered]:
        answers = sorted(chat.trained)[-1 if options.train_on == "last" else 0 :]
        if not answers:
            return
        messages = [
            _with_reasoning(chat, index, options.reasoning) for index in range(len(chat.messages))
        ]
        check_images(chat, messages)
        form, full = self._readable(chat, messages)
        self._check_tools(chat, [form(message) for message in messages], full)
        view = ChatView(self, chat, messages, form, full)
        for trained in [[answer] for answer in answers] if options.split_turns else [answers]:
            stop = trained[0] + 1 if options.split_turns else len(messages)
            view.check_fields(trained, stop)
            text, spans = (
                view.split_turn(trained[0]) if options.split_turns else view.answers(trained)
            )
            is_masked = options.reasoning == "mask"
            thoughts = view.thoughts(trained, stop) if is_masked else None
            yield view.rendered(text, spans, thoughts, stop)

    def _readable(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Form, tuple[str, list[Span]]]:
        """Return the form of messages readable for the template, and the rendered text. The content
        is text, or a list of parts as expected by templates of models with images.

        Raises:
            DataError: If the template writes neither form.
        """
        refusals, missing = [], None
        forms: tuple[Form, ...] = (as_it_is, in_parts())
        if chat.images:
            forms = (in_parts(chat.images[0].kind), with_placeholders(chat.placeholder))
        for form in forms:
            try:
                rendered = self.render(chat, [form(message) for message in messages])
            except DataError as error:
                refusals.append(error)
                continue
            fault = unwritten(messages, rendered[0]) or unplaced(chat, rendered[0])
            if fault is None:
                return form, rendered
            missing = missing or fault
        if missing is None:
            raise refusals[0]
        raise DataError(
            f"{chat.where}: the chat template does not write {missing}, so that it would not be "
            "trained; set another chat_template"
        )

    def _check_tools(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], rendered: tuple[str, list[Span]]
    ) -> None:
        """Refuse tools if the template writes the same text without any.

        Raises:
            DataError: If tools would be lost.
        """
        if chat.functions:
            raise DataError(
                f"{chat.where}: the row has functions, an older form that templates do not read; "
                "write them as tools, or set drop_fields=[functions] to train without them"
            )
        if chat.tools is None:
            return
        try:
            is_same = self.render(replace(chat, tools=None), messages) == rendered
        except DataError:  # the template asks for the tools
            return
        if is_same:
            raise DataError(
                f"{chat.where}: the chat template does not write the row's tools, so that the "
                "model would not see them; leave them out (in training data: "
                "drop_fields=[tools]), or set another chat_template"
            )

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
                return self._rendered(template, chat, with_text_arguments(messages), prompt)
        except (
            TemplateError, TypeError, KeyError, ValueError, IndexError, ArithmeticError,
        ) as error:  # fmt: skip
            said = f"({type(error).__name__}: {error})"
            if begins_with_answer(messages):
                raise DataError(
                    f"{chat.where}: the conversation begins with an answer, and the chat template "
                    f"takes no answer without a question {said}. Write the user's message before "
                    "it, or set another chat_template."
                ) from error
            raise DataError(
                f"{chat.where}: the chat template does not take the first {len(messages)} messages "
                f"{said}. Mend the row, or set another chat_template."
            ) from error

    def _rendered(
        self, template: str, chat: Chat, messages: Sequence[Mapping[str, Any]], prompt: bool
    ) -> tuple[str, list[Span]]:
        require("transformers", "chat data")
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = self.marks(chat)
        render: Any = render_jinja_template
        texts, spans = render(
            [list(messages)],
            tools=None if chat.tools is None else list(chat.tools),
            chat_template=self._preamble + template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=prompt,
            **{**self._values, **chat.options},
        )
        return texts[0], [(begin, end) for begin, end in spans[0]] if marked else []

    def _template(self, chat: Chat) -> str:
        return self.sources[self._name(chat)]

    def _name(self, chat: Chat) -> str:
        return "tool_use" if chat.tools and "tool_use" in self.sources else "default"

    def prompt(self, chat: Chat) -> str:
        """Return the text of a conversation for the model to answer.

        Raises:
            DataError: If the template refuses the conversation, or does not write a message or the
                tools.
        """
        form, full = self._readable(chat, chat.messages)
        messages = [form(message) for message in chat.messages]
        self._check_tools(chat, messages, full)
        return self.render(chat, messages, prompt=True)[0]

    def with_image(self, kind: str = "image") -> str:
        """Return the text of a conversation with an image, or a sound, in parts."""
        turns = [{"role": "user", "content": f"{IMAGE}a"}, {"role": ASSISTANT, "content": "a"}]
        chat = Chat("a conversation with an image", turns)
        return self.render(chat, list(map(in_parts(kind), turns)))[0]

    @cached_property
    def behind_answer(self) -> str:
        """Text behind the content of a last answer, such as the end of a turn. Empty: unknown."""
        if self._training is not None and self._training.ends_at_header:
            return self._training.behind_answer
        turns = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": _STAND_IN}]
        chat = Chat("the end of a turn", turns, trained=frozenset([1]))
        try:
            _, (text, _) = self._readable(chat, turns)
        except DataError:
            return ""
        return text.rpartition(_STAND_IN)[2]

    def marks(self, chat: Chat) -> bool:
        """Return whether the template marks the answers of a conversation."""
        return _MARKS.search(self._template(chat)) is not None

    def without_end(self, text: str) -> str:
        """Return ``text`` without an end-of-text token. Several templates write the token only
        behind the last message.
        """
        return text.removesuffix(self._end) if self._end else text


def _compile(template: str) -> None:
    from jinja2 import TemplateError

    require("transformers", "a chat template")
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)
    except TemplateError as error:
        raise ConfigError(
            f"chat_template is no Jinja template ({error}); set it to the text of one, or to the "
            "path of a file"
        ) from error


def _with_reasoning(chat: Chat, index: int, reasoning: Reasoning) -> Mapping[str, Any]:
    message = chat.messages[index]
    if message["role"] != ASSISTANT or reasoning not in ("drop", "inline"):
        return message
    if reasoning == "inline":
        return inlined(message)
    fields = without_reasoning(message)
    if index in chat.trained:
        check_remains(chat.where, index, message, fields)
    return fields
