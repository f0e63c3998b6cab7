"""Templates of conversations beside training: the template for serving, and the date of prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import date, datetime, timezone

from megatron_lightning.data.indexed.remote import store_of
from megatron_lightning.data.rows.sources import source_files
from megatron_lightning.errors import ConfigError

_MARK = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
_NOW, _DATE = "strftime_now", "date_string"
_LLAMA = "%d %b %Y"  # format of date_string in the templates of Llama 3
_FIELDS = "aAwdbBmyYHIpMSfzZjUWcxXGuV"  # of strftime
_CLOCK = """{{%- macro strftime_now(format) -%}}
{{%- set text = namespace(value=format) -%}}
{{%- for field, value in {fields}.items() -%}}
{{%- set text.value = text.value | replace(field, value) -%}}
{{%- endfor -%}}
{{{{- text.value -}}}}
{{%- endmacro %}}
"""
_NO_CLOCK = """{%- macro strftime_now(format) -%}
{{- raise_exception("the template writes the date of the prompt, and the data have no modification \
date: set date of the data module, such as date=2026-11-28") -}}
{%- endmacro %}
"""


def without_marks(template: str) -> str:
    """Return a template without the marks of answers (``{% generation %}``), which not every server
    knows. The rendered text is the same: a comment takes the mark's place, since white space around
    a block depends on the block.
    """
    return _MARK.sub(r"{#\1 \2#}", template)


def writes_date(templates: Iterable[str], *, asked: bool) -> bool:
    """Return whether templates write a date.

    Args:
        templates: The templates.
        asked: Whether the user has set a date. A template with a fixed date as default keeps the
            default otherwise, as in serving.
    """
    names = (_NOW, _DATE) if asked else (_NOW,)
    return any(name in template for template in templates for name in names)


class PromptDate:
    """Date in prompts, the same on every day of training.

    Args:
        day: The date. None: a template that writes the date is an error.
    """

    def __init__(self, day: date | None) -> None:
        self._day = None if day is None else datetime(day.year, day.month, day.day)

    def preamble(self, templates: Iterable[str]) -> str:
        """Return Jinja text before templates that ask for the time: a function in the place of the
        clock of ``transformers``. Empty: no template asks.
        """
        # A macro, since transformers passes no functions to templates.
        if not any(_NOW in template for template in templates):
            return ""
        if self._day is None:
            return _NO_CLOCK
        names = [f"%{sign}{field}" for field in _FIELDS for sign in ("", "-")]
        return _CLOCK.format(
            fields=json.dumps({n: self._day.strftime(n) for n in names} | {"%%": "%"})
        )

    def options(self, templates: Iterable[str], *, asked: bool) -> dict[str, str]:
        """Return the values of templates that take the date as a text."""
        reads = any(_DATE in template for template in templates)
        if self._day is None or not asked or not reads:
            return {}
        return {_DATE: self._day.strftime(_LLAMA)}


def parse_date(text: str) -> date:
    """Return the date in a text such as 2026-11-28.

    Raises:
        ConfigError: If the text is no date.
    """
    try:
        return date.fromisoformat(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"date={text!r} is no date ({error}). Set it to year-month-day, such as 2026-11-28."
        ) from error


def newest_date(paths: Iterable[str]) -> date | None:
    """Return the newest modification date (UTC) of data files, equal on all nodes and days. None: a
    source has no modification date, such as a data set on the Hub.
    """
    times: list[datetime] = []
    for path in paths:
        system, _ = store_of(path)
        try:
            found = [system.modified(store_of(file)[1]) for file in source_files(path) or [path]]
        except (OSError, NotImplementedError, KeyError, TypeError, ValueError):
            return None
        times += [t if t.tzinfo is not None else t.replace(tzinfo=timezone.utc) for t in found]
    return max(times).astimezone(timezone.utc).date()
