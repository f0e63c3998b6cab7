"""Adapters apart from their model: the content of folders of ``peft`` and of checkpoints, in
memory.

Names are the names of the adapted model. ``to_hugging_face`` renames the adapters of a ``GPTModel``
to the names of similar models in ``transformers`` (Llama, Mistral, Qwen). ``to_gpt`` renames back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.layers.adapters.adapter_layers import ALL_ROWS, adapted_layers
from megatron_lightning.layers.adapters.part import AdapterKind, Delta
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.peft.folder_targets import FolderTargets
from megatron_lightning.peft.matching import is_divided
from megatron_lightning.peft.methods.applied import PARTS, AppliedAdapters, FusedRows, applied_to
from megatron_lightning.peft.methods.method import AdapterMethod

_GPT_LAYERS, _HF_LAYERS = "decoder.layers.", "model.layers."
_GPT_NAMES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("self_attention.linear_qkv", "q"): "self_attn.q_proj",
        ("self_attention.linear_qkv", "k"): "self_attn.k_proj",
        ("self_attention.linear_qkv", "v"): "self_attn.v_proj",
        ("self_attention.linear_proj", ALL_ROWS): "self_attn.o_proj",
        ("mlp.linear_fc1", "gate"): "mlp.gate_proj",
        ("mlp.linear_fc1", "up"): "mlp.up_proj",
        ("mlp.linear_fc2", ALL_ROWS): "mlp.down_proj",
        ("mlp.experts.linear_fc1", ALL_ROWS): "mlp.experts.gate_up_proj",
        ("mlp.experts.linear_fc2", ALL_ROWS): "mlp.experts.down_proj",
    }
)
"""Layer and part in a ``GPTModel`` -> layer in similar models of ``transformers``."""
_GPT_SAVED: Mapping[str, str] = MappingProxyType(
    {
        "output_layer.weight": "lm_head.weight",
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    }
)


@dataclass(frozen=True)
class SavedPart:
    """An adapter of one matrix."""

    kind: AdapterKind
    tensors: Mapping[str, Tensor]
    """Full values, by the names of the part's parameters."""
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """Features between the factors."""
        return self.kind.rank(self.tensors)

    @property
    def num_experts(self) -> int:
        """Number of experts in the stacked factors. 0: not stacked."""
        return self.kind.num_experts(self.tensors)

    @property
    def lengths(self) -> Tensor | None:
        """Trained lengths [out] of the rows of the sum. None: not trained."""
        return self.kind.lengths(self.tensors)

    def delta(self) -> Delta:
        """Return the factors of what is added to the matrix."""
        return self.kind.delta(self.tensors, self.scale)

    def blank(self, num_rows: int) -> SavedPart:
        """Return an adapter of a matrix with ``num_rows`` and the same input that adds nothing."""
        return self._with(
            lambda name, tensor: (
                tensor.new_zeros(num_rows, *tensor.shape[1:])
                if name in self.kind.of_rows
                else tensor.clone()
            )
        )

    def of_rows(self, rows: Callable[[Tensor], Tensor]) -> SavedPart:
        """Return the adapter of some rows of the matrix, which ``rows`` picks."""
        return self._with(
            lambda name, tensor: rows(tensor) if name in self.kind.of_rows else tensor
        )

    def _with(self, change: Callable[[str, Tensor], Tensor]) -> SavedPart:
        tensors = {name: change(name, tensor) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base model of adapters."""

    origin: str | None = None
    """Hub id, or folder as named by the user."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    digest: str | None = None
    """Digest of the frozen weights. See ``assembly.digest``."""

    @classmethod
    def of(cls, entry: Mapping[str, Any] | None) -> Base:
        """Return the base described by plain data."""
        known_names = {"origin", "revision", "digest"}
        return cls(**{key: value for key, value in (entry or {}).items() if key in known_names})

    def check(self, digest: str, what: str) -> None:
        """Check that the weights of ``what`` are the base's weights in training.

        Raises:
            CheckpointError: If the digests differ.
        """
        kind = digest.partition(":")[0]
        if self.digest is None or self.digest.partition(":")[0] != kind or self.digest == digest:
            return
        hint = f" ({self.origin}{f' at {self.revision}' if self.revision else ''})"
        raise CheckpointError(
            f"the adapters were trained on other weights{hint if self.origin else ''} than "
            f"{what} has: digest {self.digest}, not {digest}. Adapters of another base are wrong "
            "without an error later: load the base that they belong to."
        )


@dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """The adapters of a model."""

    layers: dict[str, dict[str, SavedPart]]
    """Path of a layer -> part -> adapter."""
    method: AdapterMethod
    """Configuration of the adapters."""
    kind: AdapterKind
    """Kind of all adapters."""
    targets: tuple[str, ...]
    """Names of the adapted layers. See :class:`AppliedAdapters`."""
    fused: Mapping[str, FusedRows] = field(default_factory=dict)
    """See :class:`AppliedAdapters`."""
    saved: dict[str, Tensor] = field(default_factory=dict)
    """Name -> trained parameter or buffer of ``modules_to_save``. A tied weight has an entry for
    each of its names."""
    modules: tuple[str, ...] = ()
    """Ends of the paths of the saved modules. See :class:`AppliedAdapters`. Empty: unknown."""
    task: str | None = "CAUSAL_LM"
    """``task_type`` of the model in ``peft``."""
    base: Base = Base()
    described: FolderTargets | None = None
    """Layers that a folder's configuration means. None: not from a folder."""
    is_gpt: bool = False
    """Whether the names come from a ``GPTModel``."""

    @classmethod
    def of_state(
        cls, state: Mapping[str, Tensor], applied: AppliedAdapters, base: Base, *, is_gpt: bool
    ) -> SavedAdapters:
        """Return the adapters in a state dict of the adapted model, full tensors by name."""
        tensors: dict[tuple[str, str], dict[str, Tensor]] = {}
        other_tensors = {}
        for name, tensor in state.items():
            path, separator, name_inside = name.partition(".adapters.")
            if not separator:
                other_tensors[name] = tensor
                continue
            part, _, parameter = name_inside.partition(".")
            tensors.setdefault((path, part), {})[parameter] = tensor
        layers: dict[str, dict[str, SavedPart]] = {}
        for (owner, name), own_tensors in tensors.items():
            path, part = owner, name
            if applied.kind.num_experts(own_tensors) and name != ALL_ROWS:
                path, part = f"{owner}.{name}", ALL_ROWS  # a parameter of a module of experts
            scale = applied.method.scale_of(path)
            layers.setdefault(path, {})[part] = SavedPart(applied.kind, own_tensors, scale)
        return cls(
            layers=layers,
            method=applied.method,
            kind=applied.kind,
            targets=applied.targets,
            fused=applied.fused,
            saved=other_tensors,
            modules=applied.modules,
            task=applied.task,
            base=base,
            is_gpt=is_gpt,
        )

    def fitted(self, largest: tuple[int, int]) -> SavedAdapters:
        """Return the adapters for a base whose adapted matrices are at most ``largest``."""
        kind = self.kind.fitted(largest)
        if kind is self.kind:
            return self
        layers = {
            path: {name: replace(part, kind=kind) for name, part in parts.items()}
            for path, parts in self.layers.items()
        }
        return replace(self, kind=kind, layers=layers)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor by the names in the adapted model."""
        for path, parts in self.layers.items():
            for name, part in parts.items():
                prefix = f"{path}.adapters.{name}"
                if part.num_experts and not self.is_gpt:
                    owner, _, stack = path.rpartition(".")
                    prefix = f"{owner}.adapters.{stack}"
                for parameter, tensor in part.tensors.items():
                    yield f"{prefix}.{parameter}", tensor
        yield from self.saved.items()


def adapters_of_module(module: nn.Module) -> tuple[str, SavedAdapters]:
    """Return path and adapters of the first adapted model in a full module.

    Raises:
        ConfigError: If there are no adapters, or this rank holds only a part of the model.
    """
    for path, applied in applied_to(module).items():
        model = module.get_submodule(path)
        check_full(model)
        prefixes = tuple(f"{layer}.adapters." for layer in adapted_layers(model))
        state = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if name in applied.saved or name.startswith(prefixes)
        }
        is_gpt = isinstance(model, GPTModel)
        return path, SavedAdapters.of_state(state, applied, Base(), is_gpt=is_gpt)
    raise ConfigError(
        f"{type(module).__name__} has no adapters. Apply LoRA(...) to it, or load some by "
        "load_adapters(module, folder)."
    )


def check_full(model: nn.Module) -> None:
    """Check that a model is not a rank's part.

    Raises:
        ConfigError: If the model is a rank's part.
    """
    for layer in model.modules():
        if is_divided(layer):
            raise ConfigError(
                f"{type(model).__name__} is a part of the model on this rank. Save a checkpoint "
                "(trainer.save_checkpoint), and write folders from it: megatron-lightning adapters "
                "export|merge CHECKPOINT FOLDER."
            )


# --------------------------------------------------------------------------------------- names


def to_hugging_face(own: SavedAdapters) -> SavedAdapters:
    """Return adapters with names of ``transformers``.

    Raises:
        ConfigError: If a layer of a ``GPTModel`` has no counterpart there.
    """
    if not own.is_gpt:
        return own
    layers: dict[str, dict[str, SavedPart]] = {}
    for path, parts in own.layers.items():
        for name, part in _split(path, parts, own.fused).items():
            layers[_hf_path(path, name)] = {ALL_ROWS: part}
    unknown = [name for name in own.saved if name not in _GPT_SAVED]
    if unknown:
        raise ConfigError(
            f"{unknown[0]} of modules_to_save has no counterpart in transformers; output_layer "
            "and embedding.word_embeddings have. Leave it out, or save a full checkpoint."
        )
    saved = {_GPT_SAVED[name]: tensor for name, tensor in own.saved.items()}
    return replace(
        own,
        layers=layers,
        saved=saved,
        modules=tuple(name.split(".")[-2] for name in saved),
        targets=_short(layers),
        fused={},
        is_gpt=False,
    )


def to_gpt(theirs: SavedAdapters, model: GPTModel) -> SavedAdapters:
    """Return adapters with the names of a ``GPTModel``. Parts of a fused layer without adapters get
    adapters with B zero.

    Raises:
        CheckpointError: If a layer has no counterpart.
    """
    back = {name: key for key, name in _GPT_NAMES.items()}
    layers: dict[str, dict[str, SavedPart]] = {}
    for path, parts in theirs.layers.items():
        number, _, layer = path.removeprefix(_HF_LAYERS).partition(".")
        if not path.startswith(_HF_LAYERS) or layer not in back:
            raise CheckpointError(
                f"the folder adapts {path}, which has no counterpart in a GPTModel; "
                f"{', '.join(sorted(back))} of model.layers.N have."
            )
        own_layer, part = back[layer]
        layers.setdefault(f"{_GPT_LAYERS}{number}.{own_layer}", {})[part] = parts[ALL_ROWS]
    for path, parts in layers.items():
        layers[path] = _with_all_parts(path, parts, model)
    names = {theirs: ours for ours, theirs in _GPT_SAVED.items()}
    saved = {names.get(name, name): tensor for name, tensor in theirs.saved.items()}
    return replace(
        theirs, layers=layers, saved=saved, modules=(), targets=_short(layers), is_gpt=True
    )


def hf_paths(model: GPTModel) -> Iterator[str]:
    """Yield the paths in models of ``transformers`` of the linear layers of a ``GPTModel``."""
    layers = dict(model.named_modules())
    for number in model.decoder.layers:
        for (layer, part), name in _GPT_NAMES.items():
            child = layers.get(f"{_GPT_LAYERS}{number}.{layer}")
            parts = PARTS.get(len(getattr(child, "fused_rows", ())), (ALL_ROWS,))
            if child is not None and part in parts:
                yield f"{_HF_LAYERS}{number}.{name}"


def _with_all_parts(
    path: str, parts: Mapping[str, SavedPart], model: GPTModel
) -> dict[str, SavedPart]:
    """Return the parts of a layer in order, with zeros for missing parts."""
    if ALL_ROWS in parts:
        return dict(parts)
    part_names = [part for (layer, part), _ in _GPT_NAMES.items() if path.endswith(f".{layer}")]
    layer: Any = model.get_submodule(path)
    rows = tuple(getattr(layer, "fused_rows", (layer.out_features,)))
    first = next(iter(parts.values()))
    missing_parts = [part for part in part_names if part not in parts]
    if len(rows) > len(PARTS[3]):
        raise CheckpointError(
            f"the folder adapts {', '.join(parts)} of {path}, which has gates of its own beside "
            "the queries (attention_output_gate), and the folder has none or both in one. Train "
            "the untouched model (HuggingFaceModule)."
        )
    if first.lengths is not None and missing_parts:
        raise CheckpointError(
            f"the folder adapts {', '.join(parts)} of {path} with use_dora, and not "
            f"{', '.join(missing_parts)}, whose rows have the lengths of the base. Adapt all parts "
            "of a fused layer, or train the untouched model (HuggingFaceModule)."
        )
    complete = {}
    for part, size in zip(part_names, rows, strict=True):
        out = size * (layer.out_features // sum(rows))
        complete[part] = parts.get(part) or first.blank(out)
    return complete


def _split(
    path: str, parts: Mapping[str, SavedPart], fused: Mapping[str, FusedRows]
) -> dict[str, SavedPart]:
    """Return an adapter for each matrix of a layer. Matrices of a single common adapter share A."""
    if path not in fused or ".experts." in path:
        return dict(parts)
    rows, num_periods = fused[path]

    def rows_of(tensor: Tensor, number: int) -> Tensor:
        periods = torch.split(tensor.view(num_periods, sum(rows), -1), list(rows), dim=1)
        return periods[number].flatten(0, 1).contiguous()

    return {
        name: parts[ALL_ROWS].of_rows(partial(rows_of, number=number))
        for number, name in enumerate(PARTS[len(rows)])
    }


def _hf_path(path: str, part: str) -> str:
    number, _, layer = path.removeprefix(_GPT_LAYERS).partition(".")
    if not path.startswith(_GPT_LAYERS) or (layer, part) not in _GPT_NAMES:
        raise ConfigError(
            f"the adapter of {path} ({part}) has no counterpart in models of transformers that are "
            "built as Llama is. Leave the layer out by exclude_modules, or merge the adapters into "
            "a checkpoint: megatron-lightning adapters merge."
        )
    return f"{_HF_LAYERS}{number}.{_GPT_NAMES[layer, part]}"


def _short(layers: Mapping[str, object]) -> tuple[str, ...]:
    """Return the last segments of paths, or full paths if a layer number lacks a name."""
    numbers: dict[str, set[str]] = {}
    for path in layers:
        prefix, _, name = path.rpartition(".")
        numbers.setdefault(name, set()).add(prefix.partition("layers.")[2].partition(".")[0])
    everywhere = set[str]().union(*numbers.values())
    if all(number == everywhere for number in numbers.values()):
        return tuple(sorted(numbers))
    return tuple(sorted(layers))
