"""Several data sets as a single data set, in Megatron's order: the blend, sizes, and parsing of the
options.

A weighted blend has a requested size. Each data set is asked for a share of this size, rounded up,
and half a percent more, so that epochs and order equal Megatron's. If the blend takes more samples
than the data set then has (an error in Megatron), the data set is built again with the required
number of samples.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import fsspec
import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_lightning.data.indexed.remote import canonical_path
from megatron_lightning.data.pretraining.blend_order import (
    Blend,
    blend_index,
    exhaustive_index,
    normalized,
)
from megatron_lightning.data.pretraining.gpt_samples import GPTDataset, IndexSplit
from megatron_lightning.errors import ConfigError, DataError

PARTS = ("train", "validation", "test")
SURPLUS = 0.005
"""Fraction requested from a data set beyond the share, as in Megatron."""
Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BlendSpec:
    """Data sets by their prefixes."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """Share of each. None: by size."""

    @property
    def is_single(self) -> bool:
        """Whether this is a single data set without weights."""
        return len(self.prefixes) == 1 and self.weights is None

    @classmethod
    def parse(cls, given: Any, name: str = "data_prefix") -> BlendSpec:
        """Return the blend of an option: a prefix, a list of prefixes, a list of pairs of a weight
        and a prefix, or a flat list of Megatron.

        Raises:
            ConfigError: If the option has another form, names a prefix twice, or has bad weights.
        """
        if isinstance(given, str):
            return cls((given,))
        if not isinstance(given, Sequence) or not given:
            raise ConfigError(
                f"{name}={given!r}: must be a prefix, a list of prefixes, or a list of pairs of a "
                "weight and a prefix such as [[0.3, data/code], [0.7, data/web]]"
            )
        # Megatron's flat lists start with a weight.
        entries: list[Any] = _pairs(given) if _is_number(given[0]) else list(given)
        if all(isinstance(entry, str) for entry in entries):
            if any(map(_is_number, entries)):
                raise ConfigError(
                    f"{name}={list(given)!r} has numbers among prefixes. Write pairs of a weight "
                    "and a prefix, such as [[0.3, data/code], [0.7, data/web]]."
                )
            spec = cls(tuple(entries))
        else:
            for entry in entries:
                is_pair = isinstance(entry, Sequence) and not isinstance(entry, str)
                if not is_pair or len(entry) != 2 or not _is_number(entry[0]):
                    raise ConfigError(
                        f"{name} has the entry {entry!r} among pairs; each must be a weight and a "
                        "prefix, such as [0.3, data/code]"
                    )
            weights = tuple(float(entry[0]) for entry in entries)
            normalized(weights)
            spec = cls(tuple(str(entry[1]) for entry in entries), weights)
        names = Counter(map(canonical_path, spec.prefixes))
        twice = sorted({one for one in spec.prefixes if names[canonical_path(one)] > 1})
        if twice:
            raise ConfigError(
                f"{name} names {', '.join(twice)} twice, and a blend would give every sample of it "
                "twice in a row. Name it once, with the sum of the weights."
            )
        return spec


@dataclass(frozen=True)
class DataSpec:
    """Data of training, validation and test."""

    train: BlendSpec | None
    validation: Mapping[str, BlendSpec]
    """By name. A single validation set may be unnamed ("")."""
    test: BlendSpec | None
    is_split: bool
    """Whether ``split`` divides the documents of a common blend."""

    @classmethod
    def parse(cls, given: Any) -> DataSpec:
        """Return the data of ``data_prefix``: a blend, or a blend for each of train, validation and
        test. Validation may have several blends by name. A JSON or YAML file may hold the same.

        Raises:
            ConfigError: If ``data_prefix`` has another form.
            DataError: If a file cannot be read.
        """
        if isinstance(given, str) and given.endswith((".json", ".yaml", ".yml")):
            given = _read(given)
        if not isinstance(given, Mapping):
            blend = BlendSpec.parse(given)
            return cls(blend, {"": blend}, blend, is_split=True)
        names = {"valid": "validation"}  # Megatron's
        parts = {names.get(str(key), str(key)): value for key, value in given.items()}
        unknown = sorted(parts.keys() - set(PARTS))
        if unknown or not any(parts.values()):
            raise ConfigError(
                f"data_prefix has the keys {sorted(parts)}: they must be some of "
                f"{', '.join(PARTS)}, each with a blend"
            )
        blends = {
            part: BlendSpec.parse(_words(parts[part]), f"data_prefix.{part}")
            for part in ("train", "test")
            if parts.get(part)
        }
        return cls(
            blends.get("train"), _validation(parts.get("validation")), blends.get("test"), False
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the validation sets. Empty for a single unnamed set."""
        return tuple(name for name in self.validation if name)

    def blends(self, name: IndexSplit) -> list[BlendSpec]:
        """Return the blends of a part. Validation has a blend for each set.

        Raises:
            ConfigError: If there is no data to train on.
        """
        if name == "valid":
            return list(self.validation.values())
        blend = self.train if name == "train" else self.test
        if blend is None and name == "train":
            raise ConfigError("data_prefix has no train data; add them under train")
        return [] if blend is None else [blend]


def _validation(given: Any) -> dict[str, BlendSpec]:
    if not given:
        return {}
    if not isinstance(given, Mapping):
        return {"": BlendSpec.parse(_words(given), "data_prefix.validation")}
    for name in given:
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(
                f"data_prefix.validation has the name {name!r}; names go into the log as "
                "val_loss/NAME: use letters, digits and dashes"
            )
    return {
        name: BlendSpec.parse(_words(blend), f"data_prefix.validation.{name}")
        for name, blend in given.items()
    }


def _words(given: Any) -> Any:
    """Return the words of a text with blanks, as Megatron's files may have."""
    words = given.split() if isinstance(given, str) else None
    return words if words and len(words) > 1 else given


def _is_number(word: Any) -> bool:
    if isinstance(word, bool):
        return False
    try:
        float(word)
    except (TypeError, ValueError):
        return False
    return True


def _pairs(words: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return Megatron's flat list of weights and prefixes as pairs."""
    pairs = list(zip(words[::2], words[1::2], strict=False))
    wrong_pairs = [
        pair for pair in pairs if not _is_number(pair[0]) or not isinstance(pair[1], str)
    ]
    if len(words) % 2 or wrong_pairs:
        raise ConfigError(
            f"data_prefix={list(words)!r}: a flat list has a weight before every prefix. Write "
            "pairs, such as [[0.3, data/code], [0.7, data/web]]."
        )
    return pairs


def _read(path: str) -> Any:
    import yaml

    try:
        with fsspec.open(path, "rt", encoding="utf-8") as file:
            text = file.read()
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (ImportError, OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"data_prefix={path}: cannot be read ({error}); set it to a JSON or YAML file with a "
            "blend, or to a prefix"
        ) from error
    if isinstance(content, str):
        raise DataError(f"data_prefix={path} holds {content!r}; a blend is a list or an object")
    return content


Child = Callable[[str, "int | None"], GPTDataset]
"""Prefix and number of samples -> data set."""


class BlendedDataset(Dataset[Sample]):
    """Samples of several data sets in Megatron's order. Each sample has ``"dataset_id"``, the
    position of the data set in the blend.

    Args:
        spec: The data sets.
        num_samples: Size. None: all samples of all data sets, once.
        make: Makes a data set.
        name: Name of the part, for messages.

    Raises:
        ConfigError: If weights have no size, or a size without weights exceeds the samples.
    """

    def __init__(
        self, spec: BlendSpec, num_samples: int | None, make: Child, name: str = "train"
    ) -> None:
        self.spec = spec
        self.children: list[GPTDataset]
        """The data sets, each with the requested ``num_samples``."""
        if spec.weights is None:
            self._by_size(num_samples, make, name)
        else:
            self._by_weight(normalized(spec.weights), num_samples, make, name)
        # Made once, since making a tensor takes a twentieth of the time of a sample.
        self._ids = [torch.tensor(k) for k in range(len(self.children))]

    def _by_size(self, num_samples: int | None, make: Child, name: str) -> None:
        self.children = [make(prefix, None) for prefix in self.spec.prefixes]
        sizes = [len(child) for child in self.children]
        if num_samples is not None and num_samples > sum(sizes):
            raise ConfigError(
                f"num_{name}_samples={num_samples}, and {', '.join(self.spec.prefixes)} have "
                f"{sum(sizes)} samples in one epoch: data without weights are read once. Set it to "
                f"{sum(sizes)} or less, or give the data weights."
            )
        index = (
            exhaustive_index(sizes)
            if num_samples is None
            else blend_index(normalized([float(size) for size in sizes]), num_samples)
        )
        self.blend = Blend(index, len(sizes))

    def _by_weight(self, weights: Any, num_samples: int | None, make: Child, name: str) -> None:
        if num_samples is None:
            raise ConfigError(
                f"data_prefix has weights, and num_{name}_samples is not set, so that the size of "
                "the blend is unknown. Set it, or leave the weights out to read all data once."
            )
        shares = [ceil(num_samples * weight) for weight in weights.tolist()]
        index = blend_index(weights, sum(shares))
        counts = np.bincount(index, minlength=len(shares)).tolist()
        self.children = []
        for prefix, share, count in zip(self.spec.prefixes, shares, counts, strict=True):
            child = make(prefix, ceil(share * (1 + SURPLUS)))
            # Many small weights: Megatron stops here.
            self.children.append(child if len(child) >= count else make(prefix, count))
        self.blend = Blend(index, len(shares))

    def __len__(self) -> int:
        return len(self.blend)

    def __getitem__(self, index: int) -> Sample:
        """Return sample ``index``.

        Raises:
            IndexError: If there is no such sample.
        """
        blend = self.blend
        if not 0 <= index < len(blend.index):
            raise IndexError(f"sample {index} of {len(self)}")
        dataset, number = blend[index]
        sample = self.children[dataset][number]
        sample["dataset_id"] = self._ids[dataset]
        return sample


class NamedDatasets(Dataset[Sample]):
    """Validation sets as a single data set, mixed by size, so that the first samples cover all
    sets. Each sample has ``"validation_set"``, the position of the set, and ``"dataset_id"``, the
    position of the data set within the set: 0 if the set is a single data set.

    Args:
        datasets: The sets, each with a length.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.datasets = list(datasets)
        sizes = [len(one) for one in self.datasets]
        self._blend = Blend(exhaustive_index(sizes), len(sizes))

    def __len__(self) -> int:
        return len(self._blend)

    def __getitem__(self, index: int) -> Sample:
        """Return sample ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, sample = self._blend[index]
        # A batch mixes single data sets and blends, so that all samples need the same entries.
        entries = {"validation_set": torch.tensor(number), "dataset_id": torch.tensor(0)}
        return {**entries, **self.datasets[number][sample]}
