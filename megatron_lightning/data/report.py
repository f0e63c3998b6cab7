"""Statistics of a source's rows, in words."""

from __future__ import annotations

from megatron_lightning.data.sft import DROPPED, NULLS, UNENDED, Documents

_LEFT_OUT = (
    "rows without an answer",
    "too long",
    "left out as too long",
    "cut tokens",
    "left out without a trained token",
    "left out with the other answer",
    UNENDED,
    *DROPPED.values(),
    NULLS,
)


def describe_documents(path: str, documents: Documents) -> str:
    """Return a line about the documents of a source."""
    counts = documents.report
    tokens = counts.get("tokens", 0)
    share = counts.get("trained tokens", 0) / tokens if tokens else 0.0
    line = (
        f"{path}: {counts.get('rows', 0)} rows, {len(documents)} documents, {tokens} tokens, "
        f"{share:.1%} of them trained"
    )
    notes = [f"{name}: {counts[name]}" for name in _LEFT_OUT if counts.get(name)]
    return f"{line} ({', '.join(notes)})" if notes else line
