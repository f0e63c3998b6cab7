"""Texts of several turns, id by id: prompts and messages are rendered once, and what was sampled
is never tokenized again.

With P the text of the messages before an answer with the generation prompt, C the text of these and
the answer, and N the text of all messages with the next generation prompt:

    1. N begins with P: nothing before the answer changes because of what follows it.
    2. N begins with C, and C shows the answer: neither does the answer. The end of a last message
       alone may be missing.
    3. Behind the sampled ids stands the template's end of turn, without the end token that was
       sampled, followed by the rest of N, tokenized alone.

A template that shows earlier messages in another way once more follow breaks 1 or 2. It is refused,
or with ``keep`` the ids stay as they were sampled, whatever the template would show, or with
``split`` another text begins, with all messages so far as its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megatron_lightning.data.chat.chat_template import ChatTemplate
from megatron_lightning.data.chat.chat_tokenizer import ChatTokenizer
from megatron_lightning.data.chat.conversations import Chat, text_messages
from megatron_lightning.data.chat.row_values import ASSISTANT
from megatron_lightning.data.rows.sources import Row
from megatron_lightning.errors import DataError

History = Literal["refuse", "keep", "split"]
Message = Mapping[str, Any]
_STAND_IN = "\ue000"
"""A private character in the place of an answer."""


class RewrittenError(DataError):
    """A template shows earlier messages in another way."""


class Turns:
    """Writes the ids of a conversation with sampled answers.

    Args:
        chat: Tools and options of the conversation, and its name in errors.
        tokenizer: Of the model.
        template: Of conversations.
        ends: Ids of tokens that end an answer.
        history: ``refuse`` templates that change earlier messages, ``keep`` the sampled ids, or
            ``split`` the conversation there.
    """

    def __init__(
        self,
        chat: Chat,
        tokenizer: ChatTokenizer,
        template: ChatTemplate,
        ends: Sequence[int],
        history: History = "refuse",
    ) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._template = template
        self._ends = {int(end): tokenizer.decode([int(end)]) for end in ends}
        self._history = history
        self._is_checked = False

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the first messages, up to the first answer.

        Raises:
            DataError: If the template refuses the messages, or one has an image.
        """
        return self._encode(self._render(messages, prompt=True))

    def extend(
        self,
        before: Sequence[Message],
        answer: Message,
        new: Sequence[Message],
        sampled: Sequence[int],
    ) -> list[int] | None:
        """Return the ids between a sampled answer and the next one. None: the template changes
        earlier messages, and the conversation is split.

        Args:
            before: Messages before the answer.
            answer: The answer as a message.
            new: Messages behind the answer, one at least.
            sampled: Ids of the answer, with the end token if it was sampled.

        Raises:
            DataError: If the template changes earlier messages, or the tokenizer joins characters
                of an answer with those around it.
        """
        try:
            is_kept = self._history == "keep"
            behind = (self._kept if is_kept else self._checked)(before, answer, new)
        except RewrittenError:
            if self._history == "split":
                return None
            raise
        last = self._ends.get(sampled[-1], "") if sampled else ""
        if last:  # the template's end of turn may be another one, and the sampled one stays
            for end in (last, *self._ends.values()):
                if behind.startswith(end):
                    behind = behind[len(end) :]
                    break
        if not self._is_checked:
            self._check_seams(self._render(before, prompt=True), last, behind)
            self._is_checked = True
        return self._encode(behind)

    def _checked(self, before: Sequence[Message], answer: Message, new: Sequence[Message]) -> str:
        """Return the text behind an answer, of a template that keeps earlier messages."""
        prompt = self._render(before, prompt=True)
        closed = self._render([*before, answer])
        full = self._render([*before, answer, *new], prompt=True)
        if not full.startswith(prompt):
            raise self._rewritten([*before, answer], self._changed(before, full))
        if not full.startswith(closed):
            closed = self._template.without_end(closed)
        content = str(answer.get("content") or "")
        own = closed[len(prompt) :]
        # Text of calls and of reasoning fields is the template's; other text is shown as it is.
        is_plain = not answer.keys() - {"role", "content"}
        is_hidden = is_plain and "".join(content.split()) not in "".join(own.split())
        if is_hidden or not full.startswith(closed) or not closed.startswith(prompt):
            raise self._rewritten([*before, answer], len(before))
        return self._end_of(own, content.strip()) + full[len(closed) :]

    def _kept(self, before: Sequence[Message], answer: Message, new: Sequence[Message]) -> str:
        """Return the text behind an answer: it does not depend on the answer, so that one stands in
        that no template takes apart.
        """
        stand_in = {"role": answer["role"], "content": _STAND_IN}
        try:
            full = self._render([*before, stand_in, *new], prompt=True)
        except DataError:  # the template looks for the calls of a tool's answer
            stand_in["tool_calls"] = answer.get("tool_calls")
            full = self._render([*before, stand_in, *new], prompt=True)
        shown, _, behind = full.rpartition(_STAND_IN)
        prompt = "" if shown else self._render(before, prompt=True)
        if not shown and not full.startswith(prompt):
            raise DataError(
                f"{self._chat.where}: the chat template hides message {len(before)} "
                f"({answer['role']}), and the generation prompt before it, once further messages "
                "follow, so that nothing says what stands behind it. Set another chat_template."
            )
        behind = behind[len(prompt) :]
        if "tool_calls" in stand_in:  # the calls were sampled, and are shown behind the stand-in
            places = [behind.find(end) for end in self._ends.values() if end in behind]
            behind = behind[min(places) :] if places else behind
        return behind

    def _end_of(self, own: str, content: str) -> str:
        """Return what the template writes behind the content of an answer."""
        place = max((own.rfind(end) for end in self._ends.values() if end), default=-1)
        if place < 0 and content in own:
            place = own.rfind(content) + len(content)
        return own[place:] if place >= 0 else ""

    def _changed(self, before: Sequence[Message], full: str) -> int:
        """Return the number of the first message that ``full`` shows in another way. The answer
        behind ``before``: its generation prompt.
        """
        for number in range(len(before)):
            try:
                shown = self._render(before[: number + 1])
            except DataError:  # no conversation ends here
                continue
            if not full.startswith(self._template.without_end(shown.rstrip("\n"))):
                return number
        return len(before)

    def _rewritten(self, messages: Sequence[Message], number: int) -> RewrittenError:
        role = messages[number].get("role")
        what = "the answer" if role == ASSISTANT else "it"
        return RewrittenError(
            f"{self._chat.where}: the chat template shows message {number} ({role}) in another way "
            f"once further messages follow, so that the model would read other ids than {what} was "
            'sampled with. Set history to "keep" to train the sampled ids as they are, to "split" '
            "to begin another text there, or chat_template to one that keeps earlier messages."
        )

    def _check_seams(self, prompt: str, last: str, behind: str) -> None:
        for text, following in ((prompt, "a"), (f"a{last}", behind)):
            if self._encode(text) + self._encode(following) != self._encode(text + following):
                raise DataError(
                    f"{self._chat.where}: the tokenizer joins characters of an answer with those "
                    f"around it ({text[-12:]!r} and {following[:12]!r}), so that a conversation "
                    "has other ids than its turns. Use a chat template with special tokens around "
                    "answers."
                )

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        texts = text_messages(Row(self._chat.where, {}), messages)
        return self._template.render(self._chat, texts, prompt=prompt)[0]

    def _encode(self, text: str) -> list[int]:
        [(ids, _)] = self._tokenizer.encode([text])
        return [int(one) for one in ids]
