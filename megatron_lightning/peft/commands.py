"""``megatron-lightning adapters …``: between checkpoints, folders of ``peft`` and merged models, on
any machine, without process groups. Signatures are the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.export import write_folder as write_model
from megatron_lightning.bridge.folder_model import Plan
from megatron_lightning.bridge.import_folder import state_before_training
from megatron_lightning.bridge.lazy import Fill
from megatron_lightning.bridge.values import fills_of_checkpoint
from megatron_lightning.checkpoint.format.manifest import TensorInfo
from megatron_lightning.checkpoint.format.streaming import (
    read_box,
    slabs,
    spread_evenly,
    write_checkpoint,
)
from megatron_lightning.checkpoint.kept_files import KeptFiles, kept_entry
from megatron_lightning.checkpoint.progress import progress_bar
from megatron_lightning.checkpoint.source import CheckpointSource, open_checkpoint
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.digest import as_text, digest_of_tensors
from megatron_lightning.parallel.spec import Box
from megatron_lightning.peft import folder
from megatron_lightning.peft.merge import deltas_of, merged_fills
from megatron_lightning.peft.record import PEFT
from megatron_lightning.peft.saved import SavedAdapters, to_gpt
from megatron_lightning.peft.sources import read_saved, record_of
from megatron_lightning.peft.texts import card, stops

Dtype = Literal["float32", "bfloat16", "float16"]
_CHUNK_BYTES = 64 << 20
_OF_TOKENIZER = (
    "token", "vocab", "merges", "special", "added", "chat_template", "additional_chat",
    "generation_config",
)  # fmt: skip


def export(
    source: str,
    target: str,
    dtype: Dtype | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the adapters of a checkpoint as a folder of Hugging Face peft.

    Args:
        source: A checkpoint of any layout, or a folder of peft.
        target: The folder to write.
        dtype: Dtype of the adapters. Default: the stored dtype.
        chat_template: Template used in training, or a file with the template. Default: the
            tokenizer's.
        overwrite: Replace an existing target.

    Raises:
        CheckpointError: If the source has no adapters, or the target exists.
    """
    adapters = read_saved(source)
    files = _tokenizer_files(source)
    files |= stops(files, chat_template) | card(adapters, Path(target).name, merged=False)
    folder.write_folder(target, adapters, dtype=_dtype(dtype), overwrite=overwrite, files=files)
    print(f"{target} holds the adapters of {len(adapters.layers)} layers.")


def merge(  # noqa: PLR0917  # every argument is an option of the command line
    source: str,
    target: str,
    base: str | None = None,
    dtype: Dtype | None = None,
    chat_template: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Add adapters to the weights of their base, in fp32 and rounded once.

    Args:
        source: A checkpoint of any layout, or a folder of peft.
        target: The folder to write. For a GPTLightningModule, the checkpoint to write.
        base: Folder or Hub id of the base. For a GPTLightningModule, the checkpoint of the base.
            Leave base out if the source holds the base, or names a local folder. Only a named base
            is downloaded.
        dtype: Dtype of the weights. Default: the base's.
        chat_template: Template used in training, or a file with the template. Default: the
            tokenizer's. Generation stops at the end of a turn.
        overwrite: Replace an existing target.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        CheckpointError: If the adapters were trained on another base, or the target exists.
    """
    adapters = read_saved(source)
    if adapters.is_gpt and (checkpoint := _gpt_checkpoint(adapters, source, base)) is not None:
        _check_free(target, overwrite=overwrite)
        _merge_gpt(adapters, source, target, checkpoint, dtype)
    else:
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        base_found = _base(adapters, source, base, **options)
        texts = _tokenizer_files(source)
        texts |= stops({**base_found.plan.folder.files.contents, **texts}, chat_template)
        texts |= card(adapters, Path(target).name, merged=True)
        _merge_folder(adapters, base_found, target, dtype, files=texts, overwrite=overwrite)
    print(f"{target} holds the base with the adapters of {len(adapters.layers)} layers added.")


def import_(  # noqa: PLR0917  # every argument is an option of the command line
    source: str,
    target: str,
    base: str | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write a folder of Hugging Face peft as a checkpoint of adapters, for further training.

    Args:
        source: The folder.
        target: The checkpoint to write, for HuggingFaceModule(peft=...). If the base is a
            checkpoint, for GPTLightningModule(peft=...).
        base: Folder or Hub id of the base, or a checkpoint of a GPTLightningModule. Leave base out
            if the folder names a local base. The base's weights are not read.
        overwrite: Replace an existing target.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.

    Raises:
        CheckpointError: If the folder is none, or the target exists.
    """
    _check_free(target, overwrite=overwrite)
    adapters = folder.read_folder(source)
    # A checkpoint as base means a GPTLightningModule. Other bases are folders.
    config = None if base is None else _gpt_config(base)
    if config is None:
        options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        model = _base(adapters, source, base, **options).model
    else:
        with torch.device("meta"):
            model = GPTModel(config)
    if isinstance(model, GPTModel):
        adapters = to_gpt(adapters, model)
    names = [name for name in model.state_dict() if name not in adapters.saved]
    tensors = {f"state_dict.model.{name}": tensor for name, tensor in adapters.state()}
    entry: dict[str, Any] = {
        "lora": _as_state(asdict(adapters.lora)),
        "targets": list(adapters.targets),
        "fused": {},
        "saved": list(adapters.saved),
        "names": "gpt" if adapters.is_gpt else "own",
        "base": asdict(adapters.base),
        "left_out": [f"model.{name}" for name in names],
    }
    state = state_before_training({}) | {PEFT: {"model": entry}}
    stored = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    _write(target, stored, lambda name, box: tensors[name][box.slices], state, {})
    print(f"{target} holds the adapters of {len(adapters.layers)} layers.")


COMMANDS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"export": export, "import": import_, "merge": merge}
)
"""Name of a tool -> function."""


# ----------------------------------------------------------------------------------------- merge


class _Base(NamedTuple):
    """The base model of adapters."""

    plan: Plan
    """Recipe of a folder from the model's parameters."""
    fills: dict[str, Fill]
    """Values of the model's parameters."""
    model: nn.Module
    """The model on ``meta``."""
    what: str


def _base(
    own: SavedAdapters,
    source: str,
    base: str | None,
    *,
    revision: str | None,
    trust_remote_code: bool,
) -> _Base:
    """Return the base, from a folder or from the source."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config, fills = None, None
    if not folder.is_folder(source):
        opened = open_checkpoint(source)
        record = record_of(opened, source)
        config = _config_in(opened) if own.is_gpt else None
        entry = kept_entry(opened.state(), record.path)
        # A checkpoint with all weights is a base of its own. A checkpoint of adapters names its
        # base.
        if base is None and entry is not None and not record.left_out:
            bridge = AutoBridge.from_checkpoint(source, model=record.path, reads=False, **options)
            plan = bridge.plan(config)
            fills = fills_of_checkpoint(opened, plan.parameters, record.path)
            return _Base(plan, fills, _on_meta(bridge, config), source)
    origin = own.base.origin
    if base is None and (origin is None or not Path(origin).is_dir()):
        hint = f" ({origin}, which is no folder here)" if origin else ""
        raise CheckpointError(
            f"{source} holds no base{hint}, and nothing is downloaded unasked. Name the base: "
            f"--base {origin or 'FOLDER'}."
        )
    bridge = AutoBridge.from_hf_pretrained(base or str(origin), revision=revision, **options)
    plan = bridge.plan(config)
    fills = {name: lazy.fill for name, lazy in plan.parameters.items()}
    return _Base(plan, fills, _on_meta(bridge, config), str(bridge.path))


def _on_meta(bridge: AutoBridge, config: TransformerConfig | None) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = bridge.model_class(bridge.config) if config is None else GPTModel(config)
    return model


def _merge_folder(
    own: SavedAdapters,
    base: _Base,
    target: str,
    dtype: Dtype | None,
    *,
    files: Mapping[str, bytes],
    overwrite: bool,
) -> None:
    """Write a folder of ``transformers`` with the adapters added."""
    plan, model = base.plan, base.model
    weights = set(deltas_of(own, model))
    unknown = [name for name in (*sorted(weights), *own.saved) if name not in plan.parameters]
    if unknown:
        raise CheckpointError(
            f"the adapters change {unknown[0]}, and {type(model).__name__} has no such weight. "
            "Name their own base: --base FOLDER."
        )
    # Deltas added to other weights than they were trained on would be wrong in silence.
    _check_digest(own, base.fills, model, base.what)
    fills = merged_fills(base.fills, deltas_of(own, model)) | {
        name: _fill_from(values) for name, values in own.saved.items()
    }
    tensors = plan.tensors(fills, _dtype(dtype))
    size = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
    with progress_bar("merging", size) as advance:
        write_model(
            Path(target), plan.folder, tensors, overwrite=overwrite, files=files, advance=advance
        )


def _gpt_checkpoint(own: SavedAdapters, source: str, base: str | None) -> str | None:
    """Return the checkpoint of a ``GPTModel`` base. None: the base is in a folder."""
    if base is not None:
        return base if _gpt_config(base) is not None else None
    opened = open_checkpoint(source)
    record = record_of(opened, source)
    if record.left_out or kept_entry(opened.state(), record.path) is not None:
        return None
    return source


def _merge_gpt(
    own: SavedAdapters, source: str, target: str, base: str, dtype: Dtype | None
) -> None:
    """Write a checkpoint of a ``GPTLightningModule`` with the adapters merged into the weights."""
    opened = open_checkpoint(base)
    config = _config_in(opened)
    with torch.device("meta"):
        model = GPTModel(config)  # type: ignore[arg-type]  # _gpt_checkpoint has looked
    prefix = "state_dict.model."
    low = _dtype(dtype)
    stored = {
        name: TensorInfo(info.shape, low)
        if low is not None and info.dtype.is_floating_point
        else info
        for name, info in opened.tensors().items()
        if name.startswith("state_dict.") and ".adapters." not in name
    }
    names = [name for name, _ in model.named_parameters() if prefix + name in stored]
    fills: dict[str, Fill] = {name: _fill_of_source(opened, prefix + name) for name in names}
    _check_digest(own, fills, model, base)
    merged = merged_fills(fills, deltas_of(own, model))
    merged |= {name: _fill_from(values) for name, values in own.saved.items()}

    # A box of base and delta at a time, so that memory does not grow with the model.
    def read(name: str, box: Box) -> Tensor:
        info, own_name = stored[name], name.removeprefix(prefix)
        if own_name not in merged:
            return read_box(opened, name, info.dtype, box)
        out = torch.empty(box.shape, dtype=info.dtype)
        merged[own_name](box, out)
        return out

    state = opened.state()
    # States of the adapters' training mean nothing to the merged weights.
    for key in (PEFT, "optimizer_states", "lr_schedulers", "callbacks", "loops"):
        state.pop(key, None)
    settings = state.get("hyper_parameters")
    if isinstance(settings, dict):
        settings["peft"] = None
    _write(target, stored, read, state, {})


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


# ----------------------------------------------------------------------------------------- files


def _write(
    target: str,
    stored: Mapping[str, TensorInfo],
    read: Callable[[str, Box], Tensor],
    state: dict[str, Any],
    info: dict[str, Any],
) -> None:
    size = sum(entry.num_bytes() for entry in stored.values())
    with progress_bar("writing", size) as advance:
        files = spread_evenly(stored, lambda entry: slabs(entry, _CHUNK_BYTES), 1)
        write_checkpoint(target, stored, read, state, info, files=files, advance=advance)


def _check_free(target: str, *, overwrite: bool) -> None:
    """Check that a checkpoint does not exist, or is to be replaced."""
    if Path(target).exists() and not overwrite:
        raise CheckpointError(f"{target} exists. Name another one, or replace it with --overwrite.")


def _tokenizer_files(source: str) -> dict[str, bytes]:
    """Return the files of the tokenizer in a checkpoint or a folder of peft."""
    if folder.is_folder(source):
        return _of_tokenizer(KeptFiles.of_folder(Path(source)).contents)
    opened = open_checkpoint(source)
    record = record_of(opened, source)
    if kept_entry(opened.state(), record.path) is None:
        return {}
    from megatron_lightning.bridge.kept import read_kept

    entry = read_kept(source, record.path)
    return {} if entry is None else _of_tokenizer(entry[2].files.contents)


def _of_tokenizer(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: text for name, text in contents.items() if name.startswith(_OF_TOKENIZER)}


def _gpt_config(base: str) -> TransformerConfig | None:
    """Return the configuration in a checkpoint of a ``GPTLightningModule``. None: another base."""
    if (Path(base) / "config.json").exists() or not Path(base).exists():
        return None
    return _config_in(open_checkpoint(base))


def _config_in(source: CheckpointSource) -> TransformerConfig | None:
    config = source.state().get("hyper_parameters", {}).get("config")
    return TransformerConfig(**config) if isinstance(config, Mapping) else None


def _dtype(name: Dtype | None) -> torch.dtype | None:
    dtypes: Mapping[str, torch.dtype] = vars(torch)
    return None if name is None else dtypes[name]


def _as_state(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_state(item) for key, item in value.items()}
    return [_as_state(item) for item in value] if isinstance(value, tuple | list) else value
