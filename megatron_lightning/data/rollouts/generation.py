"""Rows of a generation: texts that the weights of one step have sampled, with their rewards.

A generation is a file of JSON lines. A row has ``group`` (rows of the same prompt), ``prompt_ids``,
``ids`` (what follows the prompt), ``mask`` (1 for a sampled id, 0 for one of a tool), ``logprobs``
and ``steps`` (of every id, null where nothing was sampled; the step is that of the weights),
``rewards`` (name -> number, null: not scored) and ``seed``. A conversation whose template shows
earlier messages in another way later has ``earlier``: the texts before, with the first five fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_lightning.data.indexed.atomic_files import atomic_write
from megatron_lightning.data.rows.packed_rows import IGNORED
from megatron_lightning.data.rows.sources import Row, read_rows
from megatron_lightning.errors import DataError

Batch = dict[str, Tensor]
_NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text that a forward reads, with what was sampled of it."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]
    steps: Sequence[int | None]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Rollout(Text):
    """A row of a generation. See the module."""

    group: int
    rewards: Mapping[str, float | None]
    seed: int | None = None
    earlier: Sequence[Text] = ()

    @property
    def texts(self) -> tuple[Text, ...]:
        """All texts of the row, in order. Most rows have one."""
        return *self.earlier, self

    @property
    def num_sampled(self) -> int:
        """Number of sampled ids."""
        return sum(sum(text.mask) for text in self.texts)

    def arrays(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return all texts, one behind another, as ``tokens`` and shifted ``labels`` [n], to be
        shown.
        """
        tokens = np.array([one for text in self.texts for one in (*text.prompt_ids, *text.ids)])
        is_sampled = np.array(
            [one for text in self.texts for one in (*[0] * len(text.prompt_ids), *text.mask)], bool
        )
        labels = np.where(is_sampled, tokens, IGNORED)[1:]
        return {"tokens": tokens, "labels": np.append(labels, IGNORED)}

    @classmethod
    def of_row(cls, row: Row) -> Rollout:
        """Return the row of a file. ``mask`` may be left out (all ids were sampled), and so may
        ``logprobs``, ``steps`` and ``seed``.

        Raises:
            DataError: If a field is missing, or has another length or type, with file and line.
        """
        if row.error is not None:
            raise row.error
        fields = row.fields
        _check_form(row.where, fields, {"group": int, "rewards": dict})
        earlier = fields.get("earlier", [])
        if not isinstance(earlier, list) or not all(isinstance(one, dict) for one in earlier):
            raise DataError(f"{row.where}: earlier is {earlier!r:.60}, and is a list of objects.")
        try:
            return cls(
                **_text_fields(row.where, fields),
                group=fields["group"],
                rewards={str(name): _number(value) for name, value in fields["rewards"].items()},
                seed=fields.get("seed"),
                earlier=tuple(Text(**_text_fields(row.where, one)) for one in earlier),
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{row.where}: {error}. Write numbers, or null.") from error


def _check_form(where: str, fields: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if not isinstance(fields.get(name), kind) or isinstance(fields[name], bool):
            found = "has none" if name not in fields else f"has {fields[name]!r:.60}"
            raise DataError(
                f"{where}: a row of a generation has {name}, {_FORMS[name]}, and this one {found}."
            )


def _text_fields(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a text. See :meth:`Rollout.of_row`."""
    _check_form(where, fields, {"prompt_ids": list, "ids": list})
    if not fields["prompt_ids"]:
        raise DataError(f"{where}: prompt_ids is empty. A text begins with one id or more.")
    count = len(fields["ids"])
    of_ids = {
        "mask": fields.get("mask", [1] * count),
        "logprobs": fields.get("logprobs") or [None] * count,
        "steps": fields.get("steps") or [None] * count,
    }
    for name, values in of_ids.items():
        if not isinstance(values, list) or len(values) != count:
            size = len(values) if isinstance(values, list) else repr(values)
            raise DataError(
                f"{where}: {name} has {size} entries and ids has {count}. Write an entry for each "
                "id."
            )
    return {
        "prompt_ids": _integers(fields["prompt_ids"]),
        "ids": _integers(fields["ids"]),
        "mask": [int(bool(value)) for value in of_ids["mask"]],
        "logprobs": [_number(value) for value in of_ids["logprobs"]],
        "steps": of_ids["steps"],
    }


_FORMS: Mapping[str, str] = {
    "group": "a number common to the rows of a prompt",
    "prompt_ids": "a list of ids",
    "ids": "a list of ids",
    "rewards": "numbers by name",
}


@dataclass(frozen=True)
class Generation:
    """The rows of a generation, of all replicas."""

    rows: Sequence[Rollout]

    @classmethod
    def read(cls, path: str) -> Generation:
        """Return the rows of a file.

        Raises:
            DataError: If the file cannot be read, or has no rows.
        """
        rows = [Rollout.of_row(row) for row in read_rows(path)]
        if not rows:
            raise DataError(f"{path}: the generation has no rows.")
        return cls(rows)

    def write(self, path: Path) -> None:
        """Write a file, complete or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            for row in self.rows:
                fields = {**vars(row), "rewards": dict(row.rewards)}  # `asdict` copies each id
                fields["earlier"] = [vars(text) for text in row.earlier]
                if not row.earlier:
                    del fields["earlier"]
                file.write(json.dumps(fields, separators=(",", ":")).encode() + b"\n")

    @cached_property
    def digest(self) -> str:
        """Name of all that is trained: texts with masks and log-probabilities, and rewards."""
        rows = [
            (
                row.group,
                {**row.rewards},
                [
                    ([*one.prompt_ids], [*one.ids], [*one.mask], [*one.logprobs])
                    for one in row.texts
                ],
            )
            for row in self.rows
        ]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:32]

    @cached_property
    def texts(self) -> list[Text]:
        """Texts of all rows, in order. Most rows have one."""
        return [text for row in self.rows for text in row.texts]

    @cached_property
    def owners(self) -> list[int]:
        """Row of every text."""
        return [number for number, row in enumerate(self.rows) for _ in row.texts]

    @cached_property
    def groups(self) -> Tensor:
        """Group of every row [n]."""
        return torch.tensor([row.group for row in self.rows])

    @cached_property
    def reward_names(self) -> list[str]:
        """Names of all rewards, in order of their appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.rewards))

    def reward(self, name: str) -> Tensor:
        """Return a reward of every row [n]. NaN: not scored."""
        values = [row.rewards.get(name) for row in self.rows]
        return torch.tensor([_NAN if value is None else value for value in values])

    def rewards(self, weights: Mapping[str, float] | None) -> Tensor:
        """Return the weighted sum of every row's rewards [n], without those that are null. NaN: no
        reward is known.

        Args:
            weights: Factor of each reward. None: 1.

        Raises:
            DataError: If a name has no reward, or no row has one.
        """
        names = self.reward_names
        if not names:
            raise DataError("no row of the generation has rewards. Write {name: number or null}.")
        unknown = set(weights or ()) - set(names)
        if unknown:
            raise DataError(
                f"reward_weights has {', '.join(sorted(unknown))}, and the rows have the rewards "
                f"{', '.join(names)}. Set it to weights of these."
            )
        factors = torch.tensor([1.0 if weights is None else weights.get(n, 1.0) for n in names])
        table = torch.stack([self.reward(name) for name in names], 1) * factors
        return table.nansum(1).masked_fill(table.isnan().all(1), _NAN)

    def truncated(self, ends: Sequence[int]) -> Tensor:
        """Return which rows [n] do not end with one of the end tokens ``ends``: by their last
        text, which the earlier ones lead to.
        """
        return torch.tensor([not row.ids or row.ids[-1] not in ends for row in self.rows])

    def batch(self, places: Sequence[int], *, padding: int, multiple: int, longest: int) -> Batch:
        """Return texts as ``tokens``, ``labels`` (shifted, -100 for what was not sampled),
        ``padding`` and ``logprobs`` (NaN: unknown) [b, s].

        Args:
            places: Numbers of the texts.
            padding: Id behind the texts.
            multiple: s is a multiple of this, or ``longest``.
            longest: Most positions of a row.
        """
        rows = [self.texts[place] for place in places]
        length = max(max(len(row) for row in rows) - 1, 1)
        length = min(-(-length // multiple) * multiple, max(longest, length))
        shape = (len(rows), length)
        batch = {
            "tokens": torch.full(shape, padding),
            "labels": torch.full(shape, IGNORED),
            "padding": torch.ones(shape, dtype=torch.bool),
            "logprobs": torch.full(shape, _NAN),
        }
        for number, row in enumerate(rows):
            text = torch.tensor([*row.prompt_ids, *row.ids])
            start, end = len(row.prompt_ids) - 1, len(row) - 1
            batch["tokens"][number, :end] = text[:-1]
            batch["padding"][number, :end] = False
            is_sampled = torch.tensor(row.mask, dtype=torch.bool)
            given = torch.tensor([_NAN if x is None else x for x in row.logprobs])
            batch["labels"][number, start:end] = text[start + 1 :].masked_fill(~is_sampled, IGNORED)
            batch["logprobs"][number, start:end] = given.masked_fill(~is_sampled, _NAN)
        return batch


def _integers(values: Sequence[Any]) -> list[int]:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{value!r} is no id of a token")
    return list(values)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
