"""Scales of inputs, keys and values that a folder holds: of a training, or of an evaluation's
statistics. And second moments of inputs, by which codes are found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import NamedTuple, Self

from torch import Tensor

from megatron_lightning.bridge.folder_model import FolderModel
from megatron_lightning.bridge.gpt import GPTFolder
from megatron_lightning.bridge.low_bit.stacks import parts_of
from megatron_lightning.bridge.pruning.statistics import Statistics
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.precision.served.gptq import factor
from megatron_lightning.precision.served.input_scales import completed

_WEIGHT = ".weight"
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_QKV = re.compile(r"(decoder\.layers\.\d+\.self_attention)\.linear_qkv\.weight")


class FixedScales(NamedTuple):
    """The largest values that scales are made of."""

    inputs: Mapping[str, float] = MappingProxyType({})
    """Path of a layer in the folder -> amax of its inputs."""
    experts: tuple[str, ...] = ()
    """Layers of experts that no token reached, with the largest amax of the layer's experts."""
    cache: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """Path of an attention in the folder -> amax of its keys, behind rotary, and of its values."""
    factors: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})
    """Path of a layer in the folder -> returns the factor of its inputs' second moments."""
    unseen: tuple[str, ...] = ()
    """Layers without second moments, whose codes are found without."""

    @classmethod
    def of_layers(cls, amax: Mapping[str, float], paths: Iterable[str]) -> Self:
        """Return the scales of layers by the largest inputs seen.

        Raises:
            CheckpointError: If no token reached a layer that is no expert.
        """
        found, experts, missing = completed(amax, paths)
        if missing:
            raise CheckpointError(
                f"the inputs of {missing[0]}{_others(missing)} have no scale: no token reached "
                "them. Train or validate on texts that do, or leave activations out."
            )
        return cls(found, experts)

    def describe(self) -> str:
        """Return sentences about what is written."""
        texts = []
        if self.inputs:
            texts.append(f"The scales of the inputs of {len(self.inputs)} layers are fixed.")
        if self.experts:
            texts.append(
                f"{len(self.experts)} matrices of experts that no token reached have the largest "
                f"of their layer ({self.experts[0]}{_others(self.experts)})."
            )
        if self.unseen:
            texts.append(
                f"{len(self.unseen)} layers without second moments, such as experts, have the "
                f"nearest codes ({self.unseen[0]}{_others(self.unseen)})."
            )
        if self.cache:
            texts.append(
                f"Keys and values of {len(self.cache)} layers have scales for a cache in fp8; no "
                "training rounds them."
            )
        return "".join(f" {text}" for text in texts)


def _others(names: tuple[str, ...]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


NONE = FixedScales()
"""No scale is fixed."""


class CalibratedFolder:
    """A folder of a family of ``GPTModel``, whose layers have statistics.

    Args:
        model: The folder.
        statistics: Of the folder as a ``GPTModel``.

    Raises:
        ConfigError: If the folder has no family.
    """

    def __init__(self, model: FolderModel, statistics: Statistics) -> None:
        gpt: GPTFolder = model.gpt_folder()
        self._config = gpt.config
        self._statistics = statistics
        tensors = gpt.tensors(gpt.config)
        statistics.check(tensors, model.path)
        pieces = gpt.pieces(gpt.config, tensors)
        self._parameters = {name: own[0].parameter for name, own in pieces.items() if own}

    def scales(
        self,
        layers: Iterable[str],
        stacks: Iterable[str],
        *,
        inputs: bool,
        cache: bool,
        moments: bool,
    ) -> FixedScales:
        """Return the scales of layers.

        Args:
            layers: Paths of the quantized layers in the folder.
            stacks: Names of stacks in the folder, of which each expert has its own layers.
            inputs: Whether inputs have fixed scales.
            cache: Whether keys and values have.
            moments: Whether second moments of inputs are needed.

        Raises:
            CheckpointError: If the statistics are of another model, or no token reached a layer.
            ConfigError: If the model has no keys and values of heads.
        """
        fixed, paths = NONE, list(layers)
        if inputs:
            owners = self._owners(stacks)
            fixed = FixedScales.of_layers(
                {p: self._amax(p, owners.get(p, p)) for p in paths}, paths
            )
        if moments:
            fixed = self._with_moments(fixed, paths)
        if not cache:
            return fixed
        return fixed._replace(cache=cache_scales(self._parameters, self._statistics))

    def _with_moments(self, fixed: FixedScales, paths: Iterable[str]) -> FixedScales:
        own = {path: self._parameters.get(f"{path}{_WEIGHT}", "") for path in paths}
        own = {path: parameter.removesuffix(_WEIGHT) for path, parameter in own.items()}

        # Of an attention's inputs and its output's: q, k and v, which the folder has apart, or gate
        # and up, share a factor.
        @lru_cache(2)
        def factor_of(owner: str) -> Tensor:
            return factor(self._statistics.moments(owner))

        found = {
            path: partial(factor_of, owner)
            for path, owner in own.items()
            if self._statistics.has_moments(owner)
        }
        if not found:
            raise CheckpointError(
                "scales is gptq, and the statistics have no second moments of inputs. Take them by "
                "LayerStatistics(path, second_moments=True)."
            )
        unseen = tuple(path for path in own if path not in found)
        return fixed._replace(factors=found, unseen=unseen)

    def _owners(self, stacks: Iterable[str]) -> dict[str, str]:
        """Return path of a layer in the folder -> path in the ``GPTModel``."""
        owners = {
            name.removesuffix(_WEIGHT): parameter.removesuffix(_WEIGHT)
            for name, parameter in self._parameters.items()
        }
        for name in stacks:
            for parts in parts_of(name, self._num_experts):
                owner = self._parameters[name].removesuffix(_WEIGHT)
                owners |= dict.fromkeys((part.removesuffix(_WEIGHT) for part in parts), owner)
        return owners

    @property
    def _num_experts(self) -> int:
        return 0 if self._config.moe is None else self._config.moe.num_experts

    def _amax(self, path: str, owner: str) -> float:
        expert = _EXPERT.search(path)
        if expert is None:
            return float(self._statistics.of(owner, "amax"))
        every = self._statistics.of(owner, "amax", self._num_experts)
        return float(every[int(expert[1])])


def cache_scales(
    parameters: Mapping[str, str], statistics: Statistics
) -> dict[str, tuple[float, float]]:
    """Return path of an attention in a folder -> amax of its keys, behind rotary, and values.

    Args:
        parameters: Name of a tensor in the folder -> parameter of the ``GPTModel``.
        statistics: Of the ``GPTModel``.

    Raises:
        CheckpointError: If the statistics are of another model, or all values were 0.
        ConfigError: If the model has no keys and values of heads.
    """
    found = {}
    for name, parameter in parameters.items():
        if match := _QKV.fullmatch(parameter):
            keys, values = (
                float(statistics.of(f"{match[1]}.{kind}", "amax")) for kind in ("keys", "values")
            )
            found[name.removesuffix(_WEIGHT).rpartition(".")[0]] = keys, values
    if not found:
        raise ConfigError(
            "kv_cache is fp8, and the model has no attention with keys and values of heads "
            "(latent attention keeps one tensor for both). Leave kv_cache out."
        )
    if not all(amax for both in found.values() for amax in both):
        raise CheckpointError(
            "kv_cache is fp8, and keys or values were zeros in all tokens of the statistics. "
            "Validate on other texts, or leave kv_cache out."
        )
    return found
