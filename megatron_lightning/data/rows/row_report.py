"""Statistics of a source's rows, in words."""

from __future__ import annotations

from megatron_lightning.data.chat.chat_encoding import (
    BROKEN,
    DROPPED,
    MERGED,
    MISSING,
    NULLS,
    REWRITTEN,
    UNCUT,
    UNENDED,
)
from megatron_lightning.data.chat.documents import Documents

_LEFT_OUT = (
    BROKEN,
    MISSING,
    "rows without an answer",
    "too long",
    "left out as too long",
    "cut tokens",
    "lost images",
    UNCUT,
    "left out without a trained token",
    "left out with the other answer",
    UNENDED,
    MERGED,
    REWRITTEN,
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
    ) + (f", {counts['images']} images" if counts.get("images") else "")
    notes = [f"{name}: {counts[name]}" for name in _LEFT_OUT if counts.get(name)]
    return f"{line} ({', '.join(notes)})" if notes else line


def warning_of(path: str, documents: Documents) -> str | None:
    """Return a warning about documents that may not be as meant. None: there are no such ones."""
    counts, warnings = documents.report, []
    if broken := counts.get(BROKEN, 0):
        warnings.append(
            f"{path}: {broken} of {counts.get('rows', 0)} rows cannot be used and are left out "
            "(bad_rows=skip). bad_rows=refuse names them."
        )
    if missing := counts.get(MISSING, 0):
        warnings.append(
            f"{path}: {missing} of {counts.get('rows', 0)} rows are left out, since an image is "
            "missing (missing=drop of images). missing=refuse names them."
        )
    if unended := counts.get(UNENDED, 0):
        warnings.append(
            f"{path}: {unended} of {counts.get('documents', 0)} samples end without a special "
            "token in what is trained, so that the model may not learn to stop. End answers in "
            "chat_template with the tokenizer's end of turn."
        )
    if merged := counts.get(MERGED, 0):
        warnings.append(
            f'{path}: {merged} answers begin inside of a token of the prompt, as "sky " with '
            '"blue", and this token is trained. Generation behind such a prompt begins with other '
            "tokens: begin the answer with the space."
        )
    return " ".join(warnings) or None
