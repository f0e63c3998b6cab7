"""Weights and state of Adam of a checkpoint or a Hugging Face folder, by the names of a
``GPTModel``, as they go into a checkpoint of Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lightning.assembly.state.left_out import refuse_partial
from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folders.folder_record import KeptFolder, read_kept
from megatron_lightning.bridge.gpt import gpt_config
from megatron_lightning.bridge.megatron_checkpoints.megatron_args import AdamOptions
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.bridge.tensors.values import prefix_of_model
from megatron_lightning.checkpoint.format.naming import OWN
from megatron_lightning.checkpoint.kept_files import kept_entry
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.models.blueprint import model_weights, saved_tensors
from megatron_lightning.parallel.shards.spec import Box, Shard
from megatron_lightning.peft.record import read_records
from megatron_lightning.precision.served.qat import read_qat

_MODULE = "state_dict."
_OPTIMIZER = "optimizer_states.0.state."
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "master"
_CLASSES = frozenset({"Adam", "AdamW"})


class ModelState(NamedTuple):
    """Model and optimizer state for export."""

    config: TransformerConfig
    weights: Mapping[str, Lazy]
    """Parameters and saved buffers by name."""
    states: Mapping[str, Mapping[str, Lazy]]
    """"param" (main params), "exp_avg" and "exp_avg_sq" -> state of every parameter, in fp32.
    Empty: no optimizer."""
    adam: AdamOptions | None
    """None: no optimizer."""
    reason: str
    """Why there is no optimizer."""
    iteration: int
    samples: int
    """Samples trained on."""


def state_of_folder(bridge: AutoBridge) -> ModelState:
    """Return the state of a Hugging Face folder."""
    config, weights, _ = bridge.gpt_parts()
    return ModelState(config, weights, {}, None, "a folder has none", 0, 0)


def state_of_checkpoint(
    path: str, *, model: str | None = None, trust_remote_code: bool = False, family: str | None
) -> ModelState:
    """Return the state of a checkpoint of any layout.

    Args:
        path: Checkpoint of a module with a ``GPTModel``, or with an untouched model of a family
            with rules.
        model: Path of the model in the LightningModule. None: the first model from a folder.
        trust_remote_code: Whether code of the folder in the checkpoint may run.
        family: Rules for a ``GPTModel``. None: the rules used at import, or of the architecture.

    Raises:
        CheckpointError: If the checkpoint does not hold a full model.
        ConfigError: If there are no rules for the model.
    """
    source = open_checkpoint(path)
    state = source.state()
    if read_records(state):
        raise ConfigError(
            f"{path} has adapters, which Megatron does not read. Merge them first: "
            "megatron-lightning adapters merge."
        )
    refuse_partial(state, path)
    if read_qat(state, path):
        raise ConfigError(
            f"{path} was trained with qat, and Megatron's forward would not round. Write a folder "
            "without rounding (convert export --quantize none), and export that folder."
        )
    entry = kept_entry(state, model)
    config = gpt_config(source, None if entry is None else entry[1])
    place = model if model is not None or entry is None else entry[0]
    rename: _Rename
    if config is not None:
        names = {n: Lazy(shape, torch.float32, _zeros) for n, shape in saved_tensors(config)}
        parameters = [weight.path for weight in model_weights(config)]
        rename = partial(_same_names, config)
    else:
        options = {
            "trust_remote_code": trust_remote_code, "family": family, "origin": path,
            "revision": None,
        }  # fmt: skip
        bridge = AutoBridge.from_kept(_record(path, model), **options)
        names = bridge.plan().parameters
        parameters = [name for name, _ in bridge.lazy_model(dtype="auto").named_parameters()]
        rename = partial(_to_gpt, path, model, options)
    prefix = prefix_of_model(source, names, place)
    stored = source.tensors()
    missing = [name for name in names if prefix + name not in stored]
    if missing:
        raise CheckpointError(f"{path} has no {prefix}{missing[0]}, which its model has.")
    own_weights = {name: _stored(source, prefix + name) for name in names}
    config, weights = rename(own_weights)
    own_states, adam, reason = _adam(source, prefix, own_weights, parameters)
    renamed = {key: rename(lazies)[1] for key, lazies in own_states.items()}
    trained = [weight.path for weight in model_weights(config)]
    return ModelState(
        config,
        weights,
        {
            key: {name: _in_fp32(lazies[name]) for name in trained}
            for key, lazies in renamed.items()
        },
        adam,
        reason,
        int(state.get("global_step") or 0),
        int((state.get(OWN) or {}).get("consumed_samples") or 0),
    )


def _same_names(
    config: TransformerConfig, lazies: Mapping[str, Lazy]
) -> tuple[TransformerConfig, Mapping[str, Lazy]]:
    return config, lazies


_Rename = Callable[[Mapping[str, Lazy]], tuple[TransformerConfig, Mapping[str, Lazy]]]


def _record(path: str, model: str | None) -> KeptFolder:
    kept = read_kept(path, model)
    if kept is None:
        raise CheckpointError(
            f"{path} holds neither a GPTModel nor a model from a Hugging Face folder, so that its "
            "names in Megatron are unknown. Export a checkpoint of GPTLightningModule or "
            "HuggingFaceModule."
        )
    return kept[2]


def _to_gpt(
    path: str, model: str | None, options: Mapping[str, Any], lazies: Mapping[str, Lazy]
) -> tuple[TransformerConfig, Mapping[str, Lazy]]:
    """Return values of the untouched model's parameters by the names of a ``GPTModel``, through the
    names of the folder.
    """
    record = _record(path, model)
    plan = AutoBridge.from_kept(record, **options).plan()
    tensors = plan.tensors({name: lazy.fill for name, lazy in lazies.items()})
    record.read_from({name: tensors[name].fill for name in plan.pieces})
    config, renamed, _ = AutoBridge.from_kept(record, **options).gpt_parts()
    return config, renamed


def _adam(
    source: CheckpointSource,
    prefix: str,
    weights: Mapping[str, Lazy],
    parameters: Iterable[str],
) -> tuple[dict[str, dict[str, Lazy]], AdamOptions | None, str]:
    """Return the states of Adam by key and parameter, its options, and why there are none."""
    stored, entries = source.tensors(), source.state().get("optimizer_states") or []
    place = _OPTIMIZER + prefix.removeprefix(_MODULE)
    names = list(parameters)
    if len(entries) != 1:
        return {}, None, f"the checkpoint has {len(entries)} optimizers"
    classes = {str(path).rpartition(".")[2] for path in entries[0].get("classes") or ()}
    if classes and not classes & _CLASSES:
        return {}, None, f"the optimizer is {entries[0]['classes'][0]}, and Megatron's is Adam"
    without = [n for n in names for key in _MOMENTS if f"{place}{n}.{key}" not in stored]
    if without:
        return {}, None, f"{len(set(without))} parameters have no moments, such as {without[0]}"
    if any(f"{place}{name}.max_exp_avg_sq" in stored for name in names):
        return {}, None, "amsgrad is set, which Megatron's Adam has not"

    def state(name: str, key: str) -> Lazy:
        """Buffers have no state: zeros, which are not written."""
        full = f"{place}{name}.{key}"
        if full in stored:
            return _stored(source, full)
        is_main = key == _MAIN  # parameters in fp32 are their own main params
        return weights[name] if is_main else Lazy(weights[name].shape, torch.float32, _zeros)

    states = {
        theirs: {name: state(name, ours) for name in weights}
        for theirs, ours in (("param", _MAIN), *((key, key) for key in _MOMENTS))
    }
    group = entries[0]["param_groups"][0]
    hyper = source.state().get("hyper_parameters") or {}
    step_name = f"{place}{names[0]}.step"
    step = float(_stored(source, step_name).read()) if step_name in stored else 0.0
    beta1, beta2 = group.get("betas", (0.9, 0.999))
    options = AdamOptions(
        step=step,
        learning_rate=float(group.get("initial_lr", group.get("lr", 0.0))),
        min_learning_rate=float(hyper.get("min_learning_rate") or 0.0),
        betas=(float(beta1), float(beta2)),
        eps=float(group.get("eps", 1e-8)),
        weight_decay=max(float(g.get("weight_decay", 0.0)) for g in entries[0]["param_groups"]),
    )
    return states, options, ""


def _stored(source: CheckpointSource, name: str) -> Lazy:
    info = source.tensors()[name]

    def fill(box: Box, out: Tensor) -> None:
        if out.numel():
            source.read([(name, Shard(box.offset, out))])

    return Lazy(info.shape, info.dtype, fill)


def _in_fp32(lazy: Lazy) -> Lazy:
    return Lazy(lazy.shape, torch.float32, lazy.fill)


def _zeros(_: Box, out: Tensor) -> None:
    out.zero_()
