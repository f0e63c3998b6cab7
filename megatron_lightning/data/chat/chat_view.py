"""A conversation rendered by a template: the characters of answers and of reasoning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_lightning.data.chat.chat_fields import DROPPABLE, Mark, MarkedMessages, inlined
from megatron_lightning.data.chat.conversations import REASONING, THOUGHT, Chat
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.images.image_parts import IMAGE, ImageSource
from megatron_lightning.errors import DataError

if TYPE_CHECKING:
    from megatron_lightning.data.chat.chat_template import ChatTemplate
    from megatron_lightning.data.images.image_encoder import TextImages

Span = tuple[int, int]
Reasoning = Literal["keep", "drop", "mask", "inline"]
_WAY_OUT = (
    "set split_turns=True, with which every answer is a sample of its own, or a chat_template that "
    "marks answers with {% generation %}"
)


class UnwrittenField(DataError):
    """A field of a conversation that the template does not write."""


@dataclass(frozen=True)
class Rendered:
    """Text of a sample."""

    where: str
    text: str
    spans: Sequence[Span]
    """Start and end of every trained piece, in characters."""
    prompt: str | None = None
    """Text before the answer, of a text without a template. None: a template has written the text,
    with special tokens."""
    ends: Sequence[int] = ()
    """End of every answer, in characters. Empty if the template marks the trained characters."""
    is_rewritten: bool = False
    """Whether earlier answers have the form of a last answer, other than in the template's text."""
    images: Sequence[ImageSource] = ()
    """Images in the order of their places."""
    grown: TextImages | None = None
    """Images of a text whose places have grown. None: the text has none."""


Form = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A message -> the message in a form that the template reads."""


class ChatView:
    """A conversation rendered by a template.

    Args:
        template: The template.
        chat: The conversation.
        messages: Messages of the conversation for this rendering, with content as text.
        form: Form of messages for the template.
        full: Rendering of all messages.
    """

    def __init__(
        self,
        template: ChatTemplate,
        chat: Chat,
        messages: Sequence[Mapping[str, Any]],
        form: Form,
        full: tuple[str, list[Span]],
    ) -> None:
        self._template = template
        self._chat = chat
        self._plain = messages
        self._form = form
        self._messages = [form(message) for message in messages]
        self._full = full

    def _render(self, stop: int, *, prompt: bool = False) -> tuple[str, list[Span]]:
        if stop == len(self._messages) and not prompt:
            return self._full
        if not stop and not prompt:
            return "", []
        return self._template.render(self._chat, self._messages[:stop], prompt=prompt)

    def check_fields(self, answers: Collection[int], stop: int) -> None:
        """Check that ``stop`` messages rendered alone show all that the conversation has.

        Raises:
            UnwrittenField: If the template does not write a system message, calls of tools, or the
                reasoning of one of ``answers``.
        """
        marked = MarkedMessages(self._plain[:stop], answers)
        try:
            text = self._rendered(marked.messages)[0] if marked else ""
        except DataError:  # the template compares a marked value: ask for one value at a time
            missing = [mark for mark in marked.marks if not self._changes_text(mark, stop)]
        else:
            missing = [
                mark
                for mark in marked.unwritten(text)
                if mark.is_reasoning or not self._changes_text(mark, stop)
            ]
        for mark in missing:
            raise UnwrittenField(
                f"{self._chat.where}: the chat template does not write {mark}, so that it would be "
                f"lost; set {self._way_out(mark, stop)}"
            )

    def thoughts(self, answers: Collection[int], stop: int) -> list[Span]:
        """Return the characters of reasoning in ``answers``, in ``stop`` messages rendered alone.

        Raises:
            DataError: If the characters are not known.
        """
        marked = MarkedMessages(self._plain[:stop], answers)
        text, spans = marked.reasoning(self._rendered(marked.messages)[0]) if marked else ("", [])
        if spans and text != self._render(stop)[0]:
            raise DataError(
                f"{self._chat.where}: the chat template writes other text for other reasoning, so "
                "that the characters of the reasoning are not known; set reasoning to keep or drop"
            )
        return spans

    def _rendered(self, messages: Iterable[Mapping[str, Any]]) -> tuple[str, list[Span]]:
        return self._template.render(self._chat, [self._form(message) for message in messages])

    def _changes_text(self, mark: Mark, stop: int) -> bool:
        """Return whether the text is another one, beside white space, without a marked field, which
        may be written in part.
        """
        messages = list(self._plain[:stop])
        messages[mark.message : mark.message + 1] = mark.removed(messages[mark.message])
        try:
            texts = self._rendered(messages)[0], self._render(stop)[0]
        except DataError:  # the template asks for the field
            return True
        without, full = ("".join(text.split()) for text in texts)
        return without != full

    def _way_out(self, mark: Mark, stop: int) -> str:
        """Return what to set if the template leaves a value out."""
        ways = []
        if not mark.is_reasoning and mark.field in DROPPABLE:
            ways += [f"drop_fields=[{mark.field}] to train without it"]
        if mark.is_reasoning and mark.message < stop - 1:
            ways += ["split_turns=True, with which every answer is a sample of its own"]
        if mark.key in REASONING and self._keeps_inline(mark.message):
            ways += ["reasoning=inline to write it into the content"]
        if mark.is_reasoning:
            ways += ["reasoning=drop to train without it"]
        return ", ".join([*ways, "or another chat_template"] if ways else ["another chat_template"])

    def _keeps_inline(self, answer: int) -> bool:
        """Return whether the template writes reasoning inside of an answer's content."""
        messages = [*self._plain[:answer], inlined(self._plain[answer])]
        marked = MarkedMessages(messages, [answer])
        try:
            return not marked.unwritten(self._rendered(marked.messages)[0])
        except DataError:
            return False

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

    def rendered(
        self, text: str, spans: Sequence[Span], thoughts: Sequence[Span] | None, stop: int
    ) -> Rendered:
        """Return a sample.

        Args:
            text: Text of the first ``stop`` messages.
            spans: Characters of answers.
            thoughts: Characters of reasoning without a loss. None: reasoning has a loss.
            stop: Number of messages.

        Raises:
            DataError: If no character is trained.
        """
        is_marked = self._template.marks(self._chat) and not self._template.ends_at_header
        ends = [] if is_marked else [end for _, end in spans]
        if thoughts is not None:
            spans = _without(spans, [*thoughts, *_tagged(text, spans)])
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            raise DataError(
                f"{self._chat.where}: the chat template leaves no character of the answers to "
                "train; mend the row, or set another chat_template"
            )
        num_images = sum(map(num_images_in, self._plain[:stop]))
        images = self._chat.images[:num_images]
        return Rendered(self._chat.where, text, spans, ends=ends, images=images)


def num_images_in(message: Mapping[str, Any]) -> int:
    """Return the number of images in a message."""
    return str(message.get("content") or "").count(IMAGE)


def _tagged(text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the characters of ``<think>…</think>`` in the answers of ``spans``."""
    texts = []
    for begin, end in spans:
        texts += [
            (begin + match.start(), begin + match.end())
            for match in THOUGHT.finditer(text[begin:end])
        ]
        # The generation prompt may have opened the thought.
        closed = text.find("</think>", begin, end)
        if closed >= 0 and "<think>" not in text[begin:closed]:
            texts.append((begin, closed + len("</think>")))
    return texts


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
