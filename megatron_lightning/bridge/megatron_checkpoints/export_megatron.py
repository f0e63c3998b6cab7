"""Export to the format ``torch_dist`` of Megatron-Core.

    OUT/latest_checkpointed_iteration.txt   "7", or "release" for weights without a training
    OUT/iter_0000007/                       see ``torch_dist``, with common.pt for Megatron-LM

Layers of one kind are one tensor [L, ...] with a part for each layer (and expert). In a model with
``moe.layer_freq`` every layer has names of its own, as Megatron-Core asks for. The folder appears
in a single rename.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_lightning.bridge.folders.export import begin_folder, finish_folder
from megatron_lightning.bridge.megatron_checkpoints.megatron_args import (
    check_exported,
    common_state,
    empty_states,
    megatron_args,
)
from megatron_lightning.bridge.megatron_checkpoints.model_state import ModelState
from megatron_lightning.bridge.megatron_checkpoints.torch_dist import TRACKER
from megatron_lightning.bridge.megatron_checkpoints.torch_dist_writer import (
    TorchDistWriter,
    WrittenPart,
    archive,
)
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.checkpoint.format.files import (
    beside,
    new_identifier,
    release,
    sync_directory,
    write_file,
)
from megatron_lightning.checkpoint.progress import Advance, silent
from megatron_lightning.config import TransformerConfig
from megatron_lightning.models.blueprint import LAYER
from megatron_lightning.parallel.shards.spec import Box

_COMMON = "common.pt"
_EXPERTS = ("mlp.experts.linear_fc1.weight", "mlp.experts.linear_fc2.weight")


def write_megatron(
    target: Path,
    state: ModelState,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    advance: Advance = silent,
) -> Path:
    """Write a checkpoint of Megatron. Return the folder of the iteration.

    Args:
        target: The folder of all iterations, with the tracker file.
        state: The model, with or without the state of Adam.
        dtype: Dtype of floating weights. None: as stored. States are in fp32.
        overwrite: Whether an existing target is replaced. False: an existing target is refused.
        advance: Called with the number of written bytes.

    Raises:
        CheckpointError: If the target exists, or the source is damaged.
        ConfigError: If Megatron-Core was not seen to load such a model.
    """
    check_exported(state.config)
    pending = beside(target, f".tmp-{new_identifier()}")
    locks: list[int] = []
    name = f"iter_{state.iteration:07d}" if state.iteration else "release"
    try:
        begin_folder(target, pending, overwrite, locks)
        folder = pending / name
        folder.mkdir()
        _write(folder, state, dtype, advance)
        write_file(pending / TRACKER, [str(state.iteration or "release").encode()])
        sync_directory(pending)
        finish_folder(pending, target)
    finally:
        for descriptor in locks:
            release(descriptor)
            shutil.rmtree(pending, ignore_errors=True)  # the old folder, or an unfinished folder
    return target / name


def _write(folder: Path, state: ModelState, dtype: torch.dtype | None, advance: Advance) -> None:
    config, adam = state.config, state.adam
    writer = TorchDistWriter(folder)
    try:
        put = partial(_put_tensors, writer, config, advance=advance)
        put(state.weights, prefix="", dtype=dtype)
        for key, lazies in state.states.items():
            put(lazies, prefix=f"optimizer.state.{key}.", dtype=torch.float32)
        for key, number, count in _empty_objects(config):
            writer.put_object(key, number, count)
        common = common_state(
            megatron_args(
                config,
                samples=state.samples,
                has_optimizer=adam is not None,
                bf16=(dtype or next(iter(state.weights.values())).dtype) == torch.bfloat16,
            ),
            iteration=state.iteration,
            adam=adam,
            has_experts=config.moe is not None,
        )
        write_file(folder / _COMMON, [archive(common)])
        writer.finish()
    finally:
        writer.close()


def _empty_objects(
    config: TransformerConfig,
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield key, number and count of objects that layers ask for, and that are empty without FP8:
    of each layer, of stacked experts each.
    """
    stacked = is_stacked(config)
    for layer, path, num_experts in empty_states(config):
        key = f"{LAYER if stacked else f'{LAYER}{layer}.'}{path}._extra_state"
        number, count = ((layer,), (config.num_layers,)) if stacked else ((), ())
        if not num_experts:
            yield key, number or (0,), count or (1,)
        for expert in range(num_experts):
            yield key, (*number, expert), (*count, num_experts)
    yield "decoder.final_layernorm._extra_state", (0,), (1,)


def is_stacked(config: TransformerConfig) -> bool:
    """Return whether Megatron-Core stores layers of a model as tensors [L, ...]."""
    return config.moe is None or config.moe.layer_freq == 1


def megatron_names(config: TransformerConfig, name: str) -> tuple[str, ...]:
    """Return the names of a parameter in Megatron-Core, without prefix and layer axis.

    The norm in front of experts has two: of layers by Transformer Engine, and of its local layers.
    """
    if not name.startswith(LAYER):
        return (name,)
    index, _, path = name.removeprefix(LAYER).partition(".")
    is_expert = config.layer_kinds[int(index)] == "expert"
    place = LAYER if is_stacked(config) else f"{LAYER}{index}."
    for ours, theirs in (
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
        ("mlp.experts.", "mlp.experts.experts."),
        ("mlp.shared_experts.gate.weight", "mlp.shared_experts.gate_weight"),
    ):
        if path.startswith(ours):
            renamed = place + theirs + path.removeprefix(ours)
            both = is_expert and ours == "pre_mlp_layernorm."
            return (place + path, renamed) if both else (renamed,)
    return (place + path,)


def _put_tensors(
    writer: TorchDistWriter,
    config: TransformerConfig,
    lazies: Mapping[str, Lazy],
    *,
    prefix: str,
    dtype: torch.dtype | None,
    advance: Advance,
) -> None:
    by_key: dict[str, list[Lazy]] = {}
    for name, lazy in lazies.items():
        for key in megatron_names(config, name):
            by_key.setdefault(key, []).append(lazy)
    for key, layers in by_key.items():
        first = layers[0]
        own_dtype = dtype if dtype is not None and first.dtype.is_floating_point else first.dtype
        if key.endswith("router.expert_bias"):
            own_dtype = torch.float32
        is_stack = key.startswith(LAYER) and is_stacked(config)
        has_experts = key.endswith(tuple(f".experts.{path[4:]}" for path in _EXPERTS))
        shape = ((len(layers),) if is_stack else ()) + tuple(first.shape)
        parts = (
            _part(lazy, box, layer if is_stack else None, advance)
            for layer, lazy in enumerate(layers)
            for box in _boxes(lazy, has_experts=has_experts)
        )
        writer.put_tensor(prefix + key, shape, own_dtype, parts)


def _boxes(lazy: Lazy, *, has_experts: bool) -> Iterator[Box]:
    """Yield the full tensor, or an expert at a time."""
    shape = tuple(lazy.shape)
    if not has_experts:
        yield Box.full(shape)
        return
    for expert in range(shape[0]):
        yield Box((expert, *(0 for _ in shape[1:])), (1, *shape[1:]))


def _part(lazy: Lazy, box: Box, layer: int | None, advance: Advance) -> WrittenPart:
    axis = () if layer is None else (layer,)
    written = Box((*axis, *box.offset), (*(1 for _ in axis), *box.shape))
    return WrittenPart(written, partial(_read, lazy, box, written, advance))


def _read(lazy: Lazy, box: Box, written: Box, advance: Advance) -> Tensor:
    values = lazy.read(box)
    advance(values.nbytes)
    return values.reshape(written.shape)
