"""Settings of the order of training samples. A checkpoint keeps the settings, and a resume
compares.

A resume skips a number of samples. In another order, the run would read a part of the samples twice
and never read others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from megatron_lightning.errors import CheckpointError

OnChangedData = Literal["refuse", "reorder", "continue", "restart"]
FIXED = ("sequence_length", "seed", "split")
"""Settings with an effect on the order of every data set."""


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return the differences between settings of the order, in words."""
    return [
        f"{name}: {value} here, {there[name]} there"
        for name, value in here.items()
        if name in there and there[name] != value
    ]


def describe_changes(
    here: Mapping[str, Any],
    there: Mapping[str, Any],
    *,
    on_changed_data: OnChangedData,
    consumed_samples: int | None,
) -> str | None:
    """Return a warning about a changed order of the samples. None: the order is the checkpoint's.

    Args:
        here: Settings of the order in this run, by the name of the option.
        there: Settings of the order in the checkpoint's run. Names missing from ``there`` are not
            compared.
        on_changed_data: ``reorder`` accepts another order.
        consumed_samples: Samples read by the checkpoint's run, if known.

    Raises:
        CheckpointError: If the order has changed, and ``on_changed_data`` does not accept a change.
    """
    differing = differences(here, there)
    if not differing:
        return None
    what_was_read = "the samples" if consumed_samples is None else f"the {consumed_samples} samples"
    finding = (
        f"the checkpoint was written on training data in another order ({'; '.join(differing)})"
    )
    if on_changed_data != "reorder":
        raise CheckpointError(
            f"{finding}: at its position in this order, {what_was_read} that were read would come "
            "again in part, and others never. Set these options as they were, or on_changed_data "
            "to "
            '"reorder" to read on at this position of the new order all the same, or start a run '
            "from the weights alone (load_from_checkpoint). Other files, weights or "
            'num_train_samples of PretrainDataModule go on with "continue", each data set where it '
            'was left, or with "restart".'
        )
    return (
        f"{finding}. Training reads on at the same position of the new order: of {what_was_read} "
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
