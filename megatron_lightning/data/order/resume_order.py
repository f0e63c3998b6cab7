"""Settings of the order of training samples. A checkpoint keeps the settings, and a resume
compares.

A resume skips a number of samples. In another order, the run would read a part of the samples twice
and never read others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from megatron_lightning.errors import CheckpointError

OnChangedData = Literal["refuse", "reorder", "continue", "restart"]
FIXED = ("sequence_length", "seed", "split", "tokenizer")
"""Settings with an effect on the samples of every data set."""


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return the differences between settings of the order, in words."""
    return [
        f"{name}: {value} here, {there[name]} there"
        for name, value in here.items()
        if name in there and there[name] != value
    ]


_OF_DATASETS = ("documents", "tokens", "content", "weights")
"""Settings with a value for each data set."""


def changed_rows(
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    names_here: Sequence[str],
    names_there: Sequence[str],
) -> list[str]:
    """Return the differences between settings of blends: a row for each setting, and for each data
    set that differs.

    Args:
        here: Settings of the order in this run.
        there: Settings of the order in the checkpoint's run.
        names_here: Names of the data sets in this run.
        names_there: Names of the data sets in the checkpoint's run, in the same order as the
            settings.
    """
    common = {name: value for name, value in here.items() if name not in _OF_DATASETS}
    rows, before, now = differences(common, there), _by_content(there), _by_content(here)
    if not before or len(names_there) != len(before) or len(names_here) != len(now):
        return differences(here, there)
    titles_before = dict(zip(before, names_there, strict=True))
    titles = {**titles_before, **dict(zip(now, names_here, strict=True))}
    lost = {titles[content]: content for content in before if content not in now}
    for content, found in now.items():
        # A file of the same name and other content is the same data set, written again.
        saved = before.get(content) or before.get(lost.pop(titles[content], ""), "absent")
        if content not in before and found == saved:
            rows.append(f"{titles[content]}: {found}, of other content here than there")
        elif found != saved:
            rows.append(f"{titles[content]}: {found} here, {saved} there")
    rows += [f"{name}: absent here, {before[content]} there" for name, content in lost.items()]
    kept = [content for content in now if content in before]
    if kept != [content for content in before if content in now]:
        order = ", ".join(titles[content] for content in now)
        order_before = ", ".join(titles_before[content] for content in before)
        rows.append(f"order of data sets: {order} here, {order_before} there")
    return rows or differences(here, there)


def _by_content(order: Mapping[str, Any]) -> dict[str, str]:
    """Return documents, tokens and weight of each data set by the digest of its content."""
    contents = order.get("content")
    if contents is None:
        return {}
    is_single = isinstance(contents, str)
    columns = {
        name: [order[name]] if is_single else order[name] for name in ("documents", "tokens")
    }
    contents = [contents] if is_single else contents
    weights = order.get("weights") or [None] * len(contents)
    rows = zip(columns["documents"], columns["tokens"], weights, strict=True)
    texts = [
        f"{documents} documents, {tokens} tokens"
        + ("" if weight is None else f", weight {weight:g}")
        for documents, tokens, weight in rows
    ]
    return dict(zip(contents, texts, strict=True))


def describe_changes(
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    *,
    on_changed_data: OnChangedData,
    consumed_samples: int | None,
    rows: Sequence[str] | None = None,
) -> str | None:
    """Return a warning about a changed order of the samples. None: the order is the checkpoint's.

    Args:
        here: Settings of the order in this run, by the name of the option.
        there: Settings of the order in the checkpoint's run. Names missing from ``there`` are not
            compared.
        on_changed_data: ``reorder`` accepts another order.
        consumed_samples: Samples read by the checkpoint's run, if known.
        rows: The differences in words. None: the differences of the settings.

    Raises:
        CheckpointError: If the order has changed, and ``on_changed_data`` does not accept a change.
    """
    differing = differences(here, there)
    if not differing:
        return None
    what_was_read = "the samples" if consumed_samples is None else f"the {consumed_samples} samples"
    # The command line prints an error in one line: rows end with a mark.
    table = ";\n".join(f"  {row}" for row in rows or differing)
    finding = f"the checkpoint was written on training data in another order:\n{table}.\n"
    if on_changed_data != "reorder":
        raise CheckpointError(
            f"{finding}At its position in this order, {what_was_read} that were read would come "
            "again in part, and others never. Set these options as they were, or on_changed_data "
            "to "
            '"reorder" to read on at this position of the new order all the same, or start a run '
            "from the weights alone (load_from_checkpoint). Other files, weights or "
            'num_train_samples of PretrainDataModule go on with "continue", each data set where it '
            'was left, or with "restart".'
        )
    return (
        f"{finding}Training reads on at the same position of the new order: of {what_was_read} "
        "that were read, those that stand behind it come again, and as many others are never read."
    )


def check_new_tokens(
    there: Mapping[str, int], *, vocabulary: Mapping[str, int], added: Iterable[str]
) -> None:
    """Check that a resumed run has the new tokens of the checkpoint's run.

    Args:
        there: Text -> id of the new tokens in the checkpoint's run.
        vocabulary: Text -> id of all tokens in this run.
        added: Texts of the tokens that this run adds to the model's tokenizer.

    Raises:
        CheckpointError: If a token is missing, has another id, or is new in this run.
    """
    changed = [text for text, token in there.items() if vocabulary.get(text) != token]
    if changed:
        ids = {text: vocabulary.get(text) for text in changed}
        raise CheckpointError(
            f"the checkpoint was written with new_tokens {list(there)}, and this run has "
            f"{', '.join(_described(text, token, there[text]) for text, token in ids.items())}: "
            "the rows trained for these tokens would be read for other text. Set new_tokens to "
            f"{list(there)}, in this order."
        )
    later = [text for text in added if text not in there]
    if later:
        raise CheckpointError(
            f"new_tokens has {later}, and the run of the checkpoint had {list(there)}: a resumed "
            "run draws no rows for further tokens, and rows without training mean nothing. Set "
            f"new_tokens to {list(there)}, or export the model and start a fit from the folder."
        )


def _described(text: str, token: int | None, expected: int) -> str:
    found = "no such token" if token is None else f"id {token}"
    return f"{found} in the place of {text!r} with id {expected}"
