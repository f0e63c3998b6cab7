"""Upcycling: turn the checkpoint of a dense model into the checkpoint of a model with experts
(Komatsuzaki et al., https://arxiv.org/abs/2212.05055, for language models
https://arxiv.org/abs/2410.07524).

    mlp.linear_fc1.weight [f, h]    mlp.experts.linear_fc1.weight [E, f, h], E copies
    mlp.linear_fc2.weight [h, f]    mlp.experts.linear_fc2.weight [E, h, f], E copies
    their biases                    E copies
                                    mlp.router.weight [E, h], initial values of the new model
                                    mlp.shared_experts.linear_fc1 …, initial values, and zeros for
                                    linear_fc2, so that the output begins at zero

Everything else is copied. All experts of a token compute the same, so the layer's output is the
dense output times the sum of the token's probabilities. See :func:`reasons_to_differ`.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.format.streaming import (
    CHUNK_BYTES,
    read_box,
    slabs,
    spread_evenly,
    write_checkpoint,
)
from megatron_lightning.checkpoint.progress import Advance, progress_bar, silent
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.config import MoEConfig, TransformerConfig
from megatron_lightning.config.class_paths import config_of_checkpoint
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.spec import Box

_WEIGHTS = "state_dict."
_MODEL = "state_dict.model."
_EXPERTS = re.compile(r"(.*\.mlp)\.experts\.(.*)")
# Entries about the module, not about the training run.
_KEPT = (
    "pytorch-lightning_version",
    "state_dict",
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
)


def upcycle(source: str, target: str, *, moe: MoEConfig) -> None:
    """Make a checkpoint with experts from a dense GPT model's checkpoint.

    The experts are copies of the dense feed-forward networks.

    Args:
        source: A checkpoint of GPTLightningModule: a directory of any layout, or a plain .ckpt
            file.
        target: The checkpoint directory to write. An existing directory is replaced. A run resumes
            from the checkpoint at step 0, with new optimizer states.
        moe: The experts, as in the model's configuration: --moe.num_experts=8, or a YAML file.
    """
    upcycling = Upcycling(open_checkpoint(source), source, moe)
    reasons = reasons_to_differ(moe)
    if reasons:
        warnings.warn(
            f"the new model's loss differs from that of {source}: {'; '.join(reasons)}.",
            stacklevel=2,
        )
    tensors = upcycling.tensors().values()
    with progress_bar("upcycling", sum(info.num_bytes() for info in tensors)) as advance:
        upcycling.write(target, advance)
    num_layers = upcycling.config.num_expert_layers
    print(
        f"{target}: {num_layers} of {upcycling.config.num_layers} layers have {moe.num_experts} "
        "experts each; it begins at step 0, without optimizer states."
    )


def reasons_to_differ(moe: MoEConfig) -> list[str]:
    """Return the reasons why the probabilities of a token do not add up to 1, so that the layer's
    first output differs from the dense output. Empty: they add up to 1.
    """
    reasons = []
    softmax, k = moe.router_score_function == "softmax", moe.router_topk
    if softmax and moe.router_pre_softmax and k < moe.num_experts:
        reasons.append(
            f"with moe.router_pre_softmax=True the probabilities of {k} of {moe.num_experts} "
            "experts add up to less than 1"
        )
    if not softmax and k == 1:
        reasons.append(
            f"with moe.router_score_function={moe.router_score_function} the probability of one "
            "expert is its score"
        )
    if moe.router_topk_scaling_factor not in (None, 1.0):
        reasons.append(
            f"moe.router_topk_scaling_factor={moe.router_topk_scaling_factor} multiplies them"
        )
    factor = moe.expert_capacity_factor
    if factor is not None and factor * k < moe.num_experts:
        reasons.append(f"with moe.expert_capacity_factor={factor} tokens may be dropped")
    return reasons


@dataclass(frozen=True)
class _Origin:
    """Source of a tensor's values."""

    source: str | None
    """Name in the dense checkpoint. None: initial values."""
    num_copies: int | None = None
    """Copies stacked along a new first dim. None: the tensor unchanged."""


class Upcycling:
    """Contents of an upcycled checkpoint, and their sources.

    Args:
        source: The dense model's checkpoint.
        path: Name of the checkpoint in messages.
        moe: The experts.

    Raises:
        CheckpointError: If the checkpoint holds no weights of a GPT model.
        ConfigError: If the model has experts already, or the experts' width differs from the dense
            width.
    """

    def __init__(
        self, source: CheckpointSource, path: str | os.PathLike[str], moe: MoEConfig
    ) -> None:
        self._source = source
        self._stored = {
            name: info for name, info in source.tensors().items() if name.startswith(_WEIGHTS)
        }
        self._state = source.state()
        dense = _config_of(self._state, path)
        self.config = _with_experts(dense, moe, path)
        """Configuration of the new model."""
        self._num_experts = moe.num_experts
        with torch.device("meta"):
            self._model = GPTModel(self.config)
        self._origins = self._find_origins(path)
        self._initial = lru_cache(maxsize=1)(self._initial_values)

    def tensors(self) -> dict[str, TensorInfo]:
        """Return the tensors of the new checkpoint, by global name."""
        shapes = {f"{_MODEL}{name}": tensor for name, tensor in self._model.state_dict().items()}
        return {
            name: self._stored[name]
            if origin.source == name
            else TensorInfo(tuple(shapes[name].shape), self._dtype(name, origin))
            for name, origin in self._origins.items()
        }

    def fetch(self, name: str, box: Box) -> Tensor:
        """Return the values of a box of a tensor of the new checkpoint."""
        origin = self._origins[name]
        if origin.source is None:
            return self._initial(name)[box.slices].contiguous()
        dtype = self._stored[origin.source].dtype
        if origin.num_copies is None:
            return read_box(self._source, origin.source, dtype, box)
        one = read_box(self._source, origin.source, dtype, Box(box.offset[1:], box.shape[1:]))
        return one.expand(box.shape).contiguous()

    def write(self, target: str | os.PathLike[str], advance: Advance = silent) -> None:
        """Write the new checkpoint, with one box in memory at a time."""
        tensors = {
            name: TensorInfo(info.shape, info.dtype) for name, info in self.tensors().items()
        }
        own_state = self._state.get(OWN, {})
        write_checkpoint(
            target,
            tensors,
            self.fetch,
            self._new_state(),
            {
                "global_step": 0,
                "config": asdict(self.config),
                "tied": dict(own_state.get("tied", {})),
            },
            files=spread_evenly(tensors, lambda info: slabs(info, CHUNK_BYTES), 1),
            advance=advance,
        )

    def _find_origins(self, path: str | os.PathLike[str]) -> dict[str, _Origin]:
        tied = {f"{_WEIGHTS}{name}" for name in self._state.get(OWN, {}).get("tied", {})}
        origins: dict[str, _Origin] = {}
        missing_names: list[str] = []
        replaced: set[str] = set()
        for name, shape in self._model_shapes():
            match = _EXPERTS.fullmatch(name)
            one = f"{match[1]}.{match[2]}" if match else name
            expected_shape = shape[1:] if match else shape
            if one in self._stored and self._stored[one].shape == expected_shape:
                origins[name] = _Origin(one, self._num_experts if match else None)
                replaced |= {one} if match else set()
            elif _is_new(name):
                origins[name] = _Origin(None)
            elif name not in tied:
                missing_names.append(f"{one} {list(expected_shape)}")
        if missing_names:
            raise CheckpointError(
                f"{path} lacks weights that its configuration describes, {len(missing_names)} in "
                f"all, such as {missing_names[0]}. Give a checkpoint of GPTLightningModule."
            )
        # Tensors of the LightningModule around the model.
        other_origins = {name: _Origin(name) for name in self._stored if name not in replaced}
        return {**other_origins, **origins}

    def _model_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, tensor in self._model.state_dict().items():
            yield f"{_MODEL}{name}", tuple(tensor.shape)

    def _dtype(self, name: str, origin: _Origin) -> torch.dtype:
        if origin.source is not None:
            return self._stored[origin.source].dtype
        if name.endswith("expert_bias"):
            return torch.float32
        layer = name.rpartition(".mlp.")[0]
        return self._stored[f"{layer}.mlp.linear_fc1.weight"].dtype

    def _initial_values(self, name: str) -> Tensor:
        """Return the initial values of a tensor, as in a model without upcycling."""
        short = name.removeprefix(_MODEL)
        like = self._model.state_dict()[short]
        values = torch.zeros(like.shape, dtype=self._dtype(name, self._origins[name]))
        if not name.endswith(("shared_experts.linear_fc2.weight", "expert_bias")):
            self._model.init_weights(short, values)
        return values

    def _new_state(self) -> dict[str, Any]:
        """Return the state of a run before the first step."""
        state = {key: self._state[key] for key in _KEPT if key in self._state}
        state["hyper_parameters"] = {
            **state["hyper_parameters"],
            "config": self.config.to_dict(),
        }
        state |= {"epoch": 0, "global_step": 0, "optimizer_states": [], "lr_schedulers": []}
        if OWN in self._state:
            state[OWN] = {
                "consumed_samples": 0,
                "skipped_steps": 0,
                "samplers": [],
                "layout": self._state[OWN]["layout"],
                "tied": dict(self._state[OWN].get("tied", {})),
                "random_states": {},
                "loaders": {},
                "layer_streams": {},
            }
        return state


def _is_new(name: str) -> bool:
    return ".mlp.router." in name or ".mlp.shared_experts." in name


def _config_of(state: Mapping[str, Any], path: str | os.PathLike[str]) -> TransformerConfig:
    config = state.get("hyper_parameters", {}).get("config")
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{path} has no hyper_parameters.config that describes a model: it was not saved by "
            "GPTLightningModule. Give the checkpoint of one."
        )
    return config_of_checkpoint(config)


def _with_experts(
    dense: TransformerConfig, moe: MoEConfig, path: str | os.PathLike[str]
) -> TransformerConfig:
    if dense.moe is not None:
        raise ConfigError(
            f"the model of {path} has {dense.moe.num_experts} experts in a layer already. Give a "
            "checkpoint of a dense model."
        )
    if moe.ffn_hidden_size not in (None, dense.ffn_size):
        raise ConfigError(
            f"moe.ffn_hidden_size={moe.ffn_hidden_size} and the network of {path} has the width "
            f"{dense.ffn_size}: experts of another width (granular upcycling) are not supported. "
            "Leave moe.ffn_hidden_size out."
        )
    if moe.latent_size is not None:
        raise ConfigError(
            f"moe.latent_size={moe.latent_size} and the network of {path} maps tokens of size "
            f"{dense.hidden_size}, which experts in latents cannot copy. Leave moe.latent_size out."
        )
    return replace(dense, moe=moe)
