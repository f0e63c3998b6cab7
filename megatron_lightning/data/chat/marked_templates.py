"""Chat templates of public models, with marks around answers for training.

A public template is known by the digest of its text. The marks are edits of that text, so nothing
of a template is kept here but the places. A marked template writes the text of the original, except
where the original rewrites earlier answers once more messages follow: there every answer keeps the
form that it has as the last one, with its reasoning, as generation writes it. What serves, and
travels with the weights, is always the original.

The table has Qwen3, Qwen3.5, Qwen3.6, DeepSeek-V3 and the models distilled
from R1, gpt-oss, Nemotron 3 and 3.5, and GLM-4.5.
"""

# ruff: noqa: RUF001  (bars of DeepSeek's tokens)

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_BEGIN, _END = "{%- generation %}", "{%- endgeneration %}"


@dataclass(frozen=True)
class Edit:
    """Replacement of the text from ``first`` up to ``last``, both included, by ``new``."""

    first: str
    new: str
    last: str = ""

    def applied(self, template: str) -> str:
        """Return the edited template."""
        begin = template.index(self.first)
        end = begin + len(self.first)
        if self.last:
            end = template.index(self.last, end) + len(self.last)
        return template[:begin] + self.new + template[end:]


@dataclass(frozen=True)
class Marks:
    """Marks of a public template."""

    edits: tuple[Edit, ...]
    keeps_text: bool = True
    """Whether the text of all messages is the original's. Otherwise the marks are used for
    conversations whose answers the original does not show."""
    ends_at_header: bool = False
    """Whether the next header ends an answer, and is trained behind it."""

    def applied(self, template: str) -> str:
        """Return the template with marks."""
        for edit in self.edits:
            template = edit.applied(template)
        return template


def _put_before(place: str, text: str) -> Edit:
    return Edit(place, text + place)


def _put_behind(place: str, text: str) -> Edit:
    return Edit(place, place + text)


def _write(*expressions: str) -> str:
    """Return statements that write expressions."""
    return "".join(f"{{{{- {expression} }}}}" for expression in expressions)


def _answer(*expressions: str) -> str:
    """Return statements that write expressions between marks."""
    return _BEGIN + _write(*expressions) + _END


_HEADER = r"'<|im_start|>assistant\n'"
_CHATML_END = "{{- '<|im_end|>\\n' }}"


def _qwen(condition: str, last: str, expression: str) -> Marks:
    """Return marks for a template that shows the reasoning of the last answers alone."""
    tool = '\n    {%- elif message.role == "tool" %}'
    return Marks(
        (
            Edit(condition, _write(_HEADER) + _BEGIN + _write(expression) + last, last),
            Edit(_CHATML_END + tool, _CHATML_END + _END + tool),
        ),
        keeps_text=False,
    )


_IS_LAST = "{%- if loop.index0 > ns.last_query_index %}"
_QWEN3 = _qwen(
    _IS_LAST,
    "{%- if message.tool_calls %}",
    r"'<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n')",
)
_QWEN3_5_ANSWER = (
    "{%- if message.tool_calls and",
    r"'<think>\n' + reasoning_content + '\n</think>\n\n' + content",
)
_QWEN3_5 = _qwen(_IS_LAST, *_QWEN3_5_ANSWER)
_QWEN3_6 = _qwen("{%- if (preserve_thinking is defined", *_QWEN3_5_ANSWER)

_STOP = "'<｜end▁of▁sentence｜>'"
# The original cuts off what stands before </think>. Generation begins with <think>.
_DEEPSEEK_ANSWER = (
    r"{%- set thought = message.reasoning_content | default('', true) %}"
    r"{%- set opened = '<think>\n' if '</think>' in message['content'] and '<think>' not in "
    r"message['content'] else '' %}"
    r"{%- set thought = '<think>\n' ~ thought ~ '\n</think>\n\n' if thought else opened %}"
    + _answer(f"'<｜Assistant｜>' ~ thought ~ message['content'] ~ {_STOP}")
)
_DEEPSEEK_ANSWERS = (
    Edit(
        "{{'<｜tool▁outputs▁end｜>' + message",
        _write("'<｜tool▁outputs▁end｜>'") + _answer(f"message['content'] + {_STOP}"),
        "}}",
    ),
    Edit("{% set content = message['content'] %}", _DEEPSEEK_ANSWER, f"content + {_STOP}}}}}"),
)
_DEEPSEEK_R1 = Marks(_DEEPSEEK_ANSWERS, keeps_text=False)  # writes no calls beside content
_DEEPSEEK_V3 = Marks(
    (
        _put_before("{%- for tool in message['tool_calls'] %}", _BEGIN),
        _put_behind("{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}", _END),
        *_DEEPSEEK_ANSWERS,
    ),
    keeps_text=False,
)

_START = '"<|start|>assistant"'


def _gpt_oss_thought(value: str) -> Edit:
    """Return an edit of the analysis before a call, whose header stands before the marks."""
    whole = f'{_START[:-1]}<|channel|>analysis<|message|>" + message.{value} + "<|end|>"'
    thought = f'"<|channel|>analysis<|message|>" + message.{value} + "<|end|>" + {_START}'
    return Edit(f"{{{{- {whole} }}}}", _write(thought))


_FINAL = '"<|channel|>final<|message|>" + message.content'
_GPT_OSS_FINAL = '{{- "<|start|>assistant<|channel|>final<|message|>" + message.content'
_GPT_OSS = Marks(
    (
        _put_before("{%- if message.content and message.thinking %}", _write(_START) + _BEGIN),
        _gpt_oss_thought("content"),
        _gpt_oss_thought("thinking"),
        Edit('{{- "<|start|>assistant to=" }}', _write('" to="')),
        _put_behind('{{- "<|call|>" }}', _END),
        _put_before(
            '{%- if "thinking" in message %}\n                {{-', _write(_START) + _BEGIN
        ),
        _gpt_oss_thought("thinking"),
        Edit(_GPT_OSS_FINAL, _write(f'{_FINAL} + "<|return|>"') + _END, '"<|return|>" }}'),
        # <|end|> ends no generation: an earlier answer is trained without an end.
        Edit(
            _GPT_OSS_FINAL,
            _write(_START) + _answer(_FINAL) + _write('"<|end|>"'),
            '"<|end|>" }}',
        ),
    )
)

_NEMOTRON = Marks(
    (
        _put_before("{%- set include_content", _BEGIN),
        Edit(_CHATML_END + "\n        {%- else %}", _CHATML_END + _END + "{%- else %}"),
        Edit(
            "{{- '<|im_start|>assistant\\n' ~ (content",
            _write(_HEADER) + _BEGIN + "{{- (content",
        ),
        _put_behind("string | trim) ~ '<|im_end|>\\n' }}", _END),
        Edit(
            "{{- '<|im_start|>assistant\\n' ~ c ~ '<|im_end|>\\n' }}",
            _write(_HEADER) + _answer(r"c ~ '<|im_end|>\n'"),
        ),
        Edit(
            "{{- '<|im_start|>assistant\\n<|im_end|>\\n' }}",
            _write(_HEADER) + _answer(r"'<|im_end|>\n'"),
        ),
    )
)

# The next header ends an answer. None follows the last answer in the original.
_GLM = Marks(
    (
        _put_before("{%- if loop.index0 > ns.last_user_index and reasoning_content -%}", _BEGIN),
        _put_before(
            "{%- elif m.role == 'tool' -%}",
            "{%- if loop.last and not add_generation_prompt %}"
            "{{- '<|observation|>' if m.tool_calls else '<|user|>' }}{%- endif %}" + _END,
        ),
    ),
    ends_at_header=True,
)

_TABLE: Mapping[str, Marks] = MappingProxyType({
    "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8": _QWEN3,
    "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": _QWEN3_5,
    "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80": _QWEN3_5,  # thinks if told
    "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259": _QWEN3_6,
    "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64": _DEEPSEEK_V3,
    "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f": _DEEPSEEK_R1,  # distilled
    "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146": _GPT_OSS,
    "43a92aacc2e169bb37055e4d8b0df31edfdc8657d8c387fcf98254cb246e626a": _NEMOTRON,  # Nano
    "3b74d76d8b903752e764cae114ae8ae2f24cd260466cf672570c745219573d28": _NEMOTRON,  # Super
    "82753bef5cedc4932c1ed509b5c9a12be680fd86d1adb65bc3f7398d11c8eebc": _NEMOTRON,  # Ultra
    "58933db77d3099b4f78c55a38347a72e1ea05b97d6bd8f38775303dc0194e0a9": _NEMOTRON,  # 3.5 Lightning
    "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3": _GLM,
})  # fmt: skip
"""Digest of a template, without white space around it -> marks."""


def digest_of(template: str) -> str:
    """Return the digest that names a template in the table."""
    return hashlib.sha256(template.strip().encode()).hexdigest()


def marks_of(template: str) -> Marks | None:
    """Return the marks of a public template. None: the template is not in the table."""
    return _TABLE.get(digest_of(template))
