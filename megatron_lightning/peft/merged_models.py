"""Adapters merged into the weights of their base: a folder of ``transformers``, or a checkpoint of
a ``GPTLightningModule``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.folder_model import FolderModel, Plan
from megatron_lightning.bridge.folders.export import write_folder
from megatron_lightning.bridge.folders.folder import FolderTensors
from megatron_lightning.bridge.hf_models.new_rows import with_vocabulary
from megatron_lightning.bridge.low_bit.trained import TrainedWeights
from megatron_lightning.bridge.tensors.lazy import Fill
from megatron_lightning.bridge.tensors.values import fills_of_checkpoint
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.streaming import (
    read_box,
    slabs,
    spread_evenly,
    write_checkpoint,
)
from megatron_lightning.checkpoint.kept_files import kept_entry
from megatron_lightning.checkpoint.progress import progress_bar
from megatron_lightning.checkpoint.reading.source import CheckpointSource, open_checkpoint
from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.class_paths import config_of_checkpoint
from megatron_lightning.errors import CheckpointError
from megatron_lightning.file_names import CONFIG
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.digest import as_text, digest_of_tensors
from megatron_lightning.parallel.shards.spec import Box
from megatron_lightning.peft import folder
from megatron_lightning.peft.fitting import check_tied, differing_copies, fitted, ties_of
from megatron_lightning.peft.merge import deltas_of, merged_fills
from megatron_lightning.peft.record import PEFT
from megatron_lightning.peft.saved import SavedAdapters
from megatron_lightning.peft.sources import record_of, rounding_of
from megatron_lightning.precision.served.qat import QAT_RECORD, described

_CHUNK_BYTES = 64 << 20


class BaseModel(NamedTuple):
    """The base model of adapters."""

    bridge: FolderModel
    plan: Plan
    """Recipe of a folder from the model's parameters."""
    fills: dict[str, Fill]
    """Values of the model's parameters."""
    model: nn.Module
    """The model on ``meta``."""
    what: str
    """Folder or checkpoint, for messages."""


def base_model(
    own: SavedAdapters,
    source: str,
    base: str | None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> BaseModel:
    """Return the base of adapters, from a folder or from the adapters' own checkpoint.

    Args:
        own: The adapters.
        source: Folder or checkpoint of the adapters.
        base: Folder or Hub id. None: the base in the source, or the local folder named there.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        CheckpointError: If no base is named.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config, grown = None, None
    if not folder.is_folder(source):
        opened = open_checkpoint(source)
        record = record_of(opened, source)
        config = config_in(opened) if own.is_gpt else None
        entry = kept_entry(opened.state(), record.path)
        # A checkpoint with all weights is a base of its own. A checkpoint of adapters names its
        # base.
        if base is None and entry is not None and not record.left_out:
            bridge = AutoBridge.from_checkpoint(source, model=record.path, reads=False, **options)
            plan = bridge.plan(config)
            fills = fills_of_checkpoint(opened, plan.parameters, record.path)
            return BaseModel(bridge, plan, fills, _on_meta(bridge, config), source)
        grown = None if entry is None else entry[1].get("grown")
    origin = own.base.origin
    if base is None and (origin is None or not Path(origin).is_dir()):
        hint = f" ({origin}, which is no folder here)" if origin else ""
        raise CheckpointError(
            f"{source} holds no base{hint}, and nothing is downloaded unasked. Name the base: "
            f"--base {origin or 'FOLDER'}."
        )
    bridge = AutoBridge.from_hf_pretrained(base or str(origin), revision=revision, **options)
    if grown is not None and grown[0] > bridge.config.get_text_config().vocab_size:
        bridge = with_vocabulary(bridge, *grown)
    plan = bridge.plan(config)
    fills = {name: lazy.fill for name, lazy in plan.parameters.items()}
    return BaseModel(bridge, plan, fills, _on_meta(bridge, config), str(bridge.path))


def _on_meta(bridge: FolderModel, config: TransformerConfig | None) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = bridge.model_class(bridge.config) if config is None else GPTModel(config)
    return model


def write_merged(
    own: SavedAdapters,
    base: BaseModel,
    target: str,
    source: str,
    dtype: torch.dtype | None,
    *,
    files: Mapping[str, bytes | None],
    overwrite: bool,
) -> list[str]:
    """Write a folder of ``transformers`` with the adapters merged. A tied weight that the adapters
    change under one of its names becomes a weight for each name.

    Args:
        own: The adapters.
        base: Their base.
        target: The folder.
        source: Folder or checkpoint of the adapters, for messages.
        dtype: Dtype of floating tensors. None: the folder's.
        files: Further files by name. None: the base's file is left out.
        overwrite: Whether an existing folder is replaced.

    Returns:
        Names of the weights that are no longer tied.

    Raises:
        CheckpointError: If the adapters do not fit the base, or the folder exists.
    """
    own = fitted(own, base.model, source)
    # Deltas added to other weights than they were trained on would be wrong in silence.
    _check_digest(own, base.fills, base.model, base.what)
    copies = differing_copies(own, base.model)
    if copies:
        if isinstance(base.model, GPTModel):
            check_tied(own, base.model, source)
        base = _untied(base, copies)
    fills = _merged(own, base.fills, base.model)
    tensors = base.plan.tensors(fills, dtype)
    like: FolderTensors = base.plan.folder
    record = rounding_of(source)
    if record is not None and dtype is None:
        rounded = TrainedWeights.of(base.plan, fills, record)
        like = rounded.folder(like, tensors, trust_remote_code=base.bridge.trusts)
        tensors = like.tensors
    elif record is not None:
        print(
            f"{target} is without the rounding of the training ({described(record.qat)}), since "
            "--dtype is set. Leave it out for the trained forward."
        )
    size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    with progress_bar("merging", size) as advance:
        write_folder(
            Path(target),
            like,
            tensors,
            overwrite=overwrite,
            files=files,
            advance=advance,
        )
    return list(copies)


def _untied(base: BaseModel, copies: Mapping[str, str]) -> BaseModel:
    """Return the base with a weight for each name of a tied weight."""
    bridge = base.bridge.untied()
    model, plan = _on_meta(bridge, None), bridge.plan()
    still_tied = copies.keys() & ties_of(model).keys()
    if still_tied:
        raise CheckpointError(
            f"the adapters change {copies[min(still_tied)]} and {min(still_tied)}, which are one "
            f"weight in every {type(model).__name__}. Train adapters without them."
        )
    fills = {name: base.fills[copies.get(name, name)] for name in plan.parameters}
    return BaseModel(bridge, plan, fills, model, base.what)


def _merged(own: SavedAdapters, fills: Mapping[str, Fill], model: nn.Module) -> dict[str, Fill]:
    """Return fills of the merged weights. Adapters may belong to a layer saved as a whole."""
    names = {ties_of(model).get(name, name): values for name, values in own.saved.items()}
    replaced = {name: _fill_from(values) for name, values in names.items()}
    return merged_fills({**fills, **replaced}, deltas_of(own, model))


def gpt_checkpoint(own: SavedAdapters, source: str, base: str | None) -> str | None:
    """Return the checkpoint of a ``GPTModel`` base. None: the base is in a folder."""
    if base is not None:
        return base if gpt_config_of(base) is not None else None
    opened = open_checkpoint(source)
    record = record_of(opened, source)
    if record.left_out or kept_entry(opened.state(), record.path) is not None:
        return None
    return source


def write_merged_gpt(
    own: SavedAdapters, source: str, target: str, base: str, dtype: torch.dtype | None
) -> None:
    """Write a checkpoint of a ``GPTLightningModule`` with the adapters merged.

    Args:
        own: The adapters.
        source: Folder or checkpoint of the adapters, for messages.
        target: The checkpoint to write.
        base: The base's checkpoint.
        dtype: Dtype of floating tensors. None: the base's.

    Raises:
        CheckpointError: If the adapters do not fit the base.
    """
    opened = open_checkpoint(base)
    with torch.device("meta"):
        model = GPTModel(config_in(opened))  # type: ignore[arg-type]  # gpt_checkpoint has looked
    own = fitted(own, model, source)
    check_tied(own, model, source)
    prefix = "state_dict.model."
    stored = {
        name: TensorInfo(info.shape, dtype)
        if dtype is not None and info.dtype.is_floating_point
        else info
        for name, info in opened.tensors().items()
        if name.startswith("state_dict.") and ".adapters." not in name
    }
    names = [name for name, _ in model.named_parameters() if prefix + name in stored]
    fills: dict[str, Fill] = {name: _fill_of_source(opened, prefix + name) for name in names}
    _check_digest(own, fills, model, base)
    merged = _merged(own, fills, model)

    # A box of base and delta at a time, so that memory does not grow with the model.
    def read(name: str, box: Box) -> Tensor:
        info, own_name = stored[name], name.removeprefix(prefix)
        if own_name not in merged:
            return read_box(opened, name, info.dtype, box)
        out = torch.empty(box.shape, dtype=info.dtype)
        merged[own_name](box, out)
        return out

    state = opened.state()
    # The forward rounds as the adapters' did, whatever the base's did.
    record = rounding_of(source)
    state[QAT_RECORD] = {} if record is None else {"model": record.entry()}
    # States of the adapters' training mean nothing to the merged weights.
    for key in (PEFT, "optimizer_states", "lr_schedulers", "callbacks", "loops"):
        state.pop(key, None)
    settings = state.get("hyper_parameters")
    if isinstance(settings, dict):
        settings["peft"] = None
        settings["qat"] = None if record is None else asdict(record.qat)
    write_tensors(target, stored, read, state)


def write_tensors(
    target: str,
    stored: Mapping[str, TensorInfo],
    read: Callable[[str, Box], Tensor],
    state: dict[str, Any],
) -> None:
    """Write a checkpoint of tensors that ``read`` returns, box by box."""
    size = sum(entry.num_bytes() for entry in stored.values())
    with progress_bar("writing", size) as advance:
        files = spread_evenly(stored, lambda entry: slabs(entry, _CHUNK_BYTES), 1)
        write_checkpoint(target, stored, read, state, {}, files=files, advance=advance)


def _check_digest(
    own: SavedAdapters, fills: Mapping[str, Fill], model: nn.Module, what: str
) -> None:
    """Check that the adapters were trained on this base, if the adapters have a digest."""
    if own.base.digest is None:
        return

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            if name not in own.saved and name in fills:
                tensor = torch.empty(parameter.shape)
                fills[name](Box.full(tuple(parameter.shape)), tensor)
                yield name, tensor

    kind = "gpt" if own.is_gpt else "own"
    own.base.check(as_text(digest_of_tensors(values()), kind), what)


def _fill_from(values: Tensor) -> Fill:
    def fill(box: Box, out: Tensor) -> None:
        out.copy_(values[box.slices])

    return fill


def _fill_of_source(source: CheckpointSource, name: str) -> Fill:
    def fill(box: Box, out: Tensor) -> None:
        out.copy_(read_box(source, name, out.dtype, box))

    return fill


def gpt_config_of(base: str) -> TransformerConfig | None:
    """Return the configuration in a checkpoint of a ``GPTLightningModule``. None: another base."""
    if (Path(base) / CONFIG).exists() or not Path(base).exists():
        return None
    return config_in(open_checkpoint(base))


def config_in(source: CheckpointSource) -> TransformerConfig | None:
    """Return the configuration in a checkpoint. None: of another model than a ``GPTModel``."""
    config = source.state().get("hyper_parameters", {}).get("config")
    return config_of_checkpoint(config) if isinstance(config, Mapping) else None
