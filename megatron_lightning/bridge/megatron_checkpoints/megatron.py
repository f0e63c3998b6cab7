"""Checkpoints of Megatron-LM and Megatron Bridge as a bridge with weights.

Names of ``GPTModel`` are Megatron-Core's, with few differences: layers of one kind are one tensor
[L, ...] there, a norm may belong to the linear layer behind it, and the vocabulary is padded. The
checkpoint's configuration is in pickles, so that a Hugging Face folder says it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge, ModelKind
from megatron_lightning.bridge.family_rules.family import OUTPUT, WORDS, new_shapes, to_config
from megatron_lightning.bridge.folders.folder_record import KeptFolder
from megatron_lightning.bridge.folders.hub import local_folder
from megatron_lightning.bridge.folders.new_files import new_files
from megatron_lightning.bridge.megatron_checkpoints.torch_dist import MegatronFolder
from megatron_lightning.bridge.tensors.lazy import Lazy
from megatron_lightning.bridge.tensors.mismatches import describe_mismatches
from megatron_lightning.checkpoint.kept_files import KeptFiles
from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.file_names import PICKLED_WEIGHTS, WEIGHTS, WEIGHTS_INDEX
from megatron_lightning.models.blueprint import LAYER, model_weights, saved_tensors
from megatron_lightning.parallel.shards.spec import Box, Shape

_STATES: Mapping[str, tuple[str, ...]] = {
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
    "master": ("fp32_param", "param"),
}
"""State of Adam in our checkpoints -> names in Megatron's. ``master`` are the main params."""
_OPTIMIZER = r"(?:chained_\d+\.)?optimizer\."
_ALIASES = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
    ("mlp.experts.", "mlp.experts.experts."),
    ("mlp.shared_experts.gate.weight", "mlp.shared_experts.gate_weight"),
    ("transformer_layer.", "mtp_model_layer."),
)
_MAX_PADDING = 128 * 64  # --make-vocab-size-divisible-by x tensor-parallel ranks


class MegatronBridge:
    """A Megatron checkpoint, beside a Hugging Face folder of the same model.

    Args:
        path: A checkpoint in the format ``torch_dist``, or the folder with the tracker file.
        like: Folder or Hub id of the same model: configuration, tokenizer, names and dtypes.
            Weights in the folder are not read, and may be missing.
        revision: Branch, tag or commit of the Hub id.
        trust_remote_code: Whether code in the folder may run.
        family: Rules for ``GPTModel``. None: the rules of the folder's architecture.

    Raises:
        CheckpointError: If the checkpoint is damaged, or is of another model.
        ConfigError: If ``like`` is missing, or there are no rules for the folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        like: str | os.PathLike[str] | None,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        family: str | None = None,
    ) -> None:
        folder = MegatronFolder(Path(path))
        if like is None:
            raise ConfigError(
                f"{path} is a checkpoint of Megatron, whose configuration is in pickles that run "
                "code. Name a Hugging Face folder of the same model, or one with its config.json "
                "and tokenizer alone: --like FOLDER."
            )
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "family": family}
        folder_options = {**options, "origin": str(like), "revision": revision}
        source = local_folder(folder_options["origin"], revision=revision, weights=False)
        has_weights = any(
            (source / name).exists() for name in (WEIGHTS, WEIGHTS_INDEX, PICKLED_WEIGHTS)
        )
        # A folder with a configuration and a tokenizer, but without weights, is enough: names
        # follow from the model's class.
        if has_weights or not Path(like).is_dir():  # a Hub id in the cache
            bridge = AutoBridge.from_hf_pretrained(
                folder_options["origin"], revision=revision, **options
            )
        else:
            record = _new_folder(AutoBridge(source, **options), folder)
            bridge = AutoBridge.from_kept(record, **folder_options)
        self._options = folder_options
        self._config, _, self._kept = bridge.gpt_parts()
        self.folder = folder
        """The checkpoint."""
        self.bridge = self._filled(model_tensors(folder, self._config))
        """The folder with the checkpoint's weights."""

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, Lazy]:
        """Return the folder's tensors with the checkpoint's values.

        Args:
            dtype: Dtype of floating tensors. None: the folder's.
        """
        plan = self.bridge.plan()
        return plan.tensors({name: lazy.fill for name, lazy in plan.parameters.items()}, dtype)

    def optimizer(self, kind: ModelKind) -> dict[str, Lazy]:
        """Return the state of Adam by ``<parameter>.<key>``. Empty: the checkpoint has none, or not
        in the parameters' shapes.

        Args:
            kind: The model with the parameters' names: "transformers" or "gpt".
        """
        step = self.folder.iteration
        state_keys = {
            key: tensors
            for key, names in _STATES.items()
            if (tensors := _state_tensors(self.folder, self._config, names))
        }
        if step is None or not {"exp_avg", "exp_avg_sq"} <= state_keys.keys():
            return {}
        made: dict[str, Lazy] = {}
        for key, tensors in state_keys.items():
            moved: Mapping[str, Tensor] = tensors
            if kind != "gpt":
                moved = dict(self._filled(tensors).lazy_model(dtype="auto").named_parameters())
            for name, tensor in moved.items():
                lazy = cast("Lazy", tensor)
                made[f"{name}.{key}"] = Lazy(lazy.shape, torch.float32, lazy.fill)
                made[f"{name}.step"] = Lazy((), torch.float32, partial(_fill_number, step))
        return made

    def _filled(self, tensors: Mapping[str, Lazy]) -> AutoBridge:
        record = self._kept.of_gpt(self._config.to_dict(), self._options["family"])
        plan = AutoBridge.from_kept(record, **self._options).plan()
        made = plan.tensors({name: lazy.fill for name, lazy in tensors.items()})
        record.read_from({name: made[name].fill for name in plan.pieces})
        return AutoBridge.from_kept(record, **self._options)


def _new_folder(bridge: AutoBridge, checkpoint: MegatronFolder) -> KeptFolder:
    """Return the record of a folder without weights: names of the family, and the dtype of
    config.json, or of the checkpoint.
    """
    config = to_config(bridge.family, bridge.config, bridge.path)
    tensors = model_tensors(checkpoint, config)
    common = tensors[WORDS].dtype  # a router's bias may have another
    dtype = getattr(bridge.config, "dtype", None) or common
    files = new_files(
        {
            name: (shape, dtype if tensors[ours].dtype == common else tensors[ours].dtype)
            for name, (shape, ours) in new_shapes(bridge.family, config).items()
        }
    )
    contents = dict(KeptFiles.of_folder(bridge.path).contents)
    if files.index_file is not None:
        contents[WEIGHTS_INDEX] = files.index_file
    return KeptFolder(
        bridge.path,
        origin=str(bridge.path),
        revision=None,
        files=KeptFiles(contents),
        tables=files.headers,
        ignored={},
    )


def _fill_number(value: float, _: Box, out: Tensor) -> None:
    out.fill_(value)


# ----------------------------------------------------------------------------------------- tensors


def model_tensors(folder: MegatronFolder, config: TransformerConfig) -> dict[str, Lazy]:
    """Return the parameters and saved buffers of a :class:`GPTModel`, by name.

    Raises:
        CheckpointError: Naming missing, misshapen and unexpected tensors.
    """
    tensors, used_keys = dict[str, Lazy](), set[str]()
    missing_keys, misshapen = list[str](), list[str]()
    for name, shape in saved_tensors(config):
        tensor, key = _find(folder, config, name)
        if tensor is None:
            missing_keys.append(key)
            continue
        # The norm before experts may stand there twice, for two kinds of layers.
        used_keys.update(key for alias in _aliases(name) for key, _ in _keys(alias))
        # Megatron pads the vocabulary to a multiple that depends on its layout.
        tensor = _without_padding(name, tensor, shape)
        if tuple(tensor.shape) != shape:
            misshapen.append(f"{key} has {list(tensor.shape)} instead of {list(shape)}")
        tensors[name] = tensor
    unused_keys = [
        key for key in folder.tensors if key not in used_keys and not re.match(_OPTIMIZER, key)
    ]
    problems = describe_mismatches(
        missing=missing_keys, misshapen=misshapen, unexpected=unused_keys
    )
    if problems:
        raise CheckpointError(
            f"{folder.path} is not the model that the configuration of --like describes: "
            f"{problems}. Name a folder of the same model, or change its config.json "
            "(num_nextn_predict_layers: 0 if the heads were not trained)."
        )
    return tensors


def _state_tensors(
    folder: MegatronFolder, config: TransformerConfig, states: tuple[str, ...]
) -> dict[str, Lazy] | None:
    """Return a state of every parameter. None: not every parameter has the state in the parameter's
    shape, such as in the ranges of a bucket.
    """
    pattern = re.compile(rf"{_OPTIMIZER}state\.(?:{'|'.join(states)})\.(.*)")
    keys = {m.group(1): key for key in folder.tensors if (m := pattern.fullmatch(key))}
    tensors = {}
    for weight in model_weights(config):
        tensor, _ = _find(folder, config, weight.path, keys)
        if tensor is None:
            return None
        tensor = _without_padding(weight.path, tensor, weight.shape)
        if tuple(tensor.shape) != weight.shape:
            return None
        tensors[weight.path] = tensor
    return tensors


def _find(
    folder: MegatronFolder,
    config: TransformerConfig,
    name: str,
    keys: Mapping[str, str] | None = None,
) -> tuple[Lazy | None, str]:
    """Return the tensor behind a name of ours, and its key. None: the key that is missing.

    Args:
        folder: The checkpoint.
        config: The model. A tensor of all layers has as many.
        name: Our name.
        keys: Key of a parameter -> key in the checkpoint. None: equal.
    """
    for alias in _aliases(name):
        for key, layer in _keys(alias):
            own_key = key if keys is None else keys.get(key, "")
            tensor = folder.tensors.get(own_key)
            if tensor is None:
                continue
            if layer is None:
                return tensor, own_key
            if tensor.shape[:1] == (config.num_layers,):
                return cast("Lazy", tensor[layer]), own_key
    return None, name


def _aliases(name: str) -> Iterator[str]:
    """Yield the names of a parameter in Megatron-Core: of local layers, of Transformer Engine's
    fused layers, and of earlier versions.
    """
    yield name
    for ours, theirs in _ALIASES:
        if ours in name and theirs not in name:
            renamed = name.replace(ours, theirs)
            yield renamed
            if ours == "transformer_layer.":
                yield from (alias for alias in _aliases(renamed) if alias != renamed)


def _keys(name: str) -> Iterator[tuple[str, int | None]]:
    """Yield the key of a layer's own tensor, and of the tensor of all layers with the index."""
    yield name, None
    if name.startswith(LAYER):
        index, _, path = name.removeprefix(LAYER).partition(".")
        yield LAYER + path, int(index)


def _without_padding(name: str, tensor: Lazy, shape: Shape) -> Lazy:
    """Return a vocabulary's rows without padding."""
    if name not in (WORDS, OUTPUT) or tensor.ndim != len(shape):
        return tensor
    if not 0 < tensor.shape[0] - shape[0] < _MAX_PADDING:
        return tensor
    return cast("Lazy", tensor[: shape[0]])
