"""Sharding plans of ``transformers`` models: our table, the model's translated ``_tp_plan``, or
linear layers that gather their outputs.

A plan of ``transformers`` maps patterns of modules and parameters to names of styles. Base model
and head are merged on the instance. Each entry becomes a style of ours. The entries of an experts
module and its parameters together become one style. Nothing is imported from ``transformers``:
attributes of the base class identify a model.

This file decides the points left open by the plans: no head is split, ranks share key and value
heads if ranks outnumber heads, both ends of a tied pair are split or neither, and a parameter that
would be summed once too often is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.linear.parallel_linear import LINEAR
from megatron_lightning.layers.linear.replaceable import has_own_forward
from megatron_lightning.layers.styles import (
    ColumnParallel,
    CopyOutput,
    DispatchedExperts,
    HeadParallel,
    KeyOrValue,
    ParameterShards,
    ReduceOutput,
    RowParallel,
    ShareInput,
    Split,
    TensorParallelExperts,
    VocabParallel,
)
from megatron_lightning.models.plans.gathered import gathered_plan
from megatron_lightning.models.plans.hf_context import finds_mixers, with_context
from megatron_lightning.models.plans.hf_heads import Attention, count_rewrites, projection
from megatron_lightning.models.plans.hf_rows import as_patterns, split_both_ends
from megatron_lightning.models.plans.hf_sequence import FullSequenceError, sequence_rows
from megatron_lightning.models.plans.hf_tables import table_of
from megatron_lightning.parallel.shards.attachments import base_layer, without_attachments
from megatron_lightning.parallel.shards.patterns import compile_pattern
from megatron_lightning.parallel.shards.sharding import ShardingPlan, Style

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_KEPT_FULL = ("replicate", "embedding_colwise", "local_params")
"""Entries without a split: an embedding by columns gives every rank the full vectors, and a module
with local parameters uses full parameters here.
"""

_SPLITS: Mapping[str, Split] = {
    "colwise": Split(-2),
    "rowwise": Split(-1),
    "packed_colwise": Split(-2, blocks=2),
    "packed_rowwise": Split(-1, blocks=2),
}
"""Style of a parameter of two or more dims -> split."""


_ACTIVATIONS = ("act", "act_fn", "activation", "activation_fn")

_LINEAR_STYLES: Mapping[str, Style] = {
    "packed_colwise": ColumnParallel(num_blocks=2),
    "rowwise": RowParallel(),
    "rowwise_split_input": RowParallel(split_input=True),
    "rowwise_rep": RowParallel(split_input=True),
}


def is_transformers_model(module: nn.Module) -> bool:
    """Return whether a module is a model of ``transformers``, with or without a plan."""
    return (
        # A peft wrapper passes the model's attributes on.
        not type(module).__module__.startswith("peft.")
        and hasattr(module, "_tp_plan")
        and hasattr(module, "base_model_prefix")
        and hasattr(getattr(module, "config", None), "get_text_config")
    )


def transformers_models(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost models of ``transformers`` in ``module``, by path."""
    models: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        is_inside = any(path.startswith(f"{outer}." if outer else "") for outer in models)
        if not is_inside and is_transformers_model(child):
            models[path] = child
    return models


def set_device_mesh(module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Set the mesh of the models of ``transformers`` in a module. The cache of their continuous
    batching has the key-value heads of a rank of the mesh.
    """
    for model in transformers_models(module).values():
        model._device_mesh = mesh  # type: ignore[assignment]


def transformers_plan(
    model: nn.Module, tensor_size: int, context_size: int = 1, expert_size: int = 1
) -> ShardingPlan:
    """Return the sharding plan of a full model of ``transformers``.

    Args:
        model: The model, with all layers.
        tensor_size: Tensor-parallel ranks.
        context_size: Context-parallel ranks.
        expert_size: Expert-parallel ranks.

    Raises:
        ConfigError: If an entry cannot be translated, heads cannot be shared by the ranks, or the
            model does not work on ranks with shared sequences.
    """
    plan = (
        ShardingPlan(modules={}, sequence_dim=1)
        if tensor_size == 1
        else _tensor_plan(model, tensor_size, full_rows=context_size > 1 and finds_mixers(model))
    )
    if expert_size > 1:
        plan = plan | _expert_plan(model)
    return plan if context_size == 1 else with_context(model, plan)


def _expert_plan(model: nn.Module) -> ShardingPlan:
    """Return rows for the experts sharded by the model's expert-parallel plan."""
    entries: Mapping[str, str] = getattr(model, "_ep_plan", None) or {}
    patterns = [compile_pattern(key) for key, name in entries.items() if name == "grouped_gemm"]
    owners = {
        name.rpartition(".")[0]: DispatchedExperts()
        for name, _ in model.named_parameters()
        if any(pattern.fullmatch(name) for pattern in patterns)
    }
    rows = as_patterns(owners, [path for path, _ in model.named_modules()])
    return ShardingPlan(modules=rows, sequence_dim=1)


def _tensor_plan(model: nn.Module, tensor_size: int, *, full_rows: bool) -> ShardingPlan:
    table = table_of(model, tensor_size)
    if table is not None:
        return table
    entries: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if all(pattern.startswith("lm_head") for pattern in entries):
        return gathered_plan(model, tensor_size)
    translation = _Translation(model, tensor_size)
    for pattern, name in entries.items():
        translation.add(pattern, name)
    return translation.plan(full_rows=full_rows)


@dataclass(frozen=True)
class _Entry:
    """A match of an entry of the plan."""

    pattern: str
    name: str
    path: str


class _Translation:
    """The rows of a model's plan during the translation."""

    def __init__(self, model: nn.Module, tensor_size: int) -> None:
        self._model = model
        self._size = tensor_size
        self._modules = {path: base_layer(child) for path, child in without_attachments(model)}
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._rows: dict[str, Style] = {}
        """Module path -> style."""
        self._splits: dict[str, dict[str, Split]] = {}
        """Module path -> splits of the module's direct parameters."""
        self._sums: dict[str, _Entry] = {}
        """Modules whose outputs are summed over the ranks."""

    # -------------------------------------------------------------------------------------- entries

    def add(self, pattern: str, name: str) -> None:
        """Translate an entry for every match. A model may lack modules named by the family's
        plan.
        """
        matches = compile_pattern(pattern).fullmatch
        for path in self._modules:
            if matches(path):
                self._add_module(_Entry(pattern, name, path))
        for path in self._parameters - self._modules.keys():
            if matches(path):
                self._add_parameter(_Entry(pattern, name, path))

    def _add_parameter(self, entry: _Entry) -> None:
        owner, _, own_name = entry.path.rpartition(".")
        if entry.name in _KEPT_FULL:
            return
        split = _SPLITS.get(entry.name)
        if split is None:
            raise self._untranslatable(entry, "parameter")
        if self._model.get_parameter(entry.path).ndim < 2:
            if entry.name.endswith("rowwise"):
                return  # like a row-parallel layer's bias
            split = Split(0, blocks=split.blocks)
        self._splits.setdefault(owner, {})[own_name] = self._fused(entry, own_name, split)

    def _fused(self, entry: _Entry, own: str, split: Split) -> Split:
        """Return the split of a parameter of experts.

        The experts say whether gate and up projections are stacked or interleaved.
        """
        experts = self._modules[entry.path.rpartition(".")[0]]
        concatenated = getattr(experts, "is_concatenated", None)
        if own != "gate_up_proj" or concatenated is None or not getattr(experts, "has_gate", True):
            return split
        if split.blocks == 2 and not concatenated:
            raise self._untranslatable(entry, "parameter with interleaved gates")
        return replace(split, blocks=2 if concatenated else 1)

    def _add_module(self, entry: _Entry) -> None:
        if entry.name in _KEPT_FULL:
            return
        if entry.name in ("moe_tp_experts", "all_reduce"):
            self._sums[entry.path] = entry
            return
        module = self._modules[entry.path]
        style = self._style(entry, module)
        if style is None:
            raise self._untranslatable(entry, type(module).__name__)
        self._rows[entry.path] = style

    def _style(self, entry: _Entry, module: nn.Module) -> Style | None:
        """Return the style of a module, or None for a class without a style."""
        if entry.name == "replicated_with_grad_allreduce":
            return HeadParallel()
        if entry.name == "moe_identity_expert":
            return ShareInput()
        if entry.name == "embedding_rowwise" and isinstance(module, nn.Embedding):
            return VocabParallel(shard_sequence=False)
        if not isinstance(module, nn.Linear) or has_own_forward(module, LINEAR):
            return None
        return self._linear_style(entry, module)

    def _linear_style(self, entry: _Entry, module: nn.Linear) -> Style | None:
        if entry.name == "colwise":
            return projection(entry.path, module, self._attention(entry.path), self._size)
        if entry.name in ("colwise_gather_output", "colwise_rep"):
            even = module.out_features % self._size == 0 and not entry.path.endswith("lm_head")
            return ColumnParallel(gather_output=True) if even else VocabParallel(gather_output=True)
        if entry.name == "mla_kv_a_proj":
            channels = self._attention(entry.path).value("qk_rope_head_dim")
            return None if channels is None else CopyOutput(channels)
        return _LINEAR_STYLES.get(entry.name)

    def _attention(self, path: str) -> Attention:
        parent, _, _ = path.rpartition(".")
        return Attention(parent, self._modules[parent], self._model)

    def _untranslatable(self, entry: _Entry, kind: str) -> ConfigError:
        return ConfigError(
            f'the tensor-parallel plan of {type(self._model).__name__} has "{entry.pattern}": '
            f'"{entry.name}", and there is no style of that kind for {entry.path} (a {kind}). '
            "Pass MegatronStrategy(sharding_plan=...) with a table of your own, or set "
            "tensor_model_parallel_size to 1."
        )

    # ----------------------------------------------------------------------------------------- plan

    def plan(self, *, full_rows: bool) -> ShardingPlan:
        """Return the plan. ``full_rows``: activations are no shards of the sequence."""
        for path, entry in self._sums.items():
            splits = self._splits.pop(path, {})
            if splits or entry.name == "moe_tp_experts":
                self._check_experts(entry, splits)
                self._rows[path] = TensorParallelExperts(splits)
            else:
                self._rows[path] = ReduceOutput()
        attentions = list(self._attentions())
        for attention in attentions:
            self._check_per_head(attention)
            self._add_head_norms(attention)
        for path, splits in self._splits.items():
            self._rows[path] = ParameterShards(splits)
        self._add_activations()
        # Features first. Rows of the sequence are possible only if the code between layers works on
        # any part of it.
        rows, why = split_both_ends(self._model, self._rows), None
        try:
            if full_rows:
                raise FullSequenceError("context-parallel ranks find what mixes its tokens")
            rows = sequence_rows(self._model, rows)
        except FullSequenceError as error:
            why = str(error)
        return ShardingPlan(
            modules=as_patterns(rows, self._modules),
            sequence_dim=1,
            attributes=count_rewrites(attentions, self._size),
            why_full_sequence=why,
        )

    def _attentions(self) -> Iterator[Attention]:
        """Yield the attention modules with split heads."""
        seen_paths: set[str] = set()
        for path in self._rows:
            attention = path.rpartition(".")[0]
            if attention not in seen_paths and self._attention(path).splits_heads(self._rows):
                seen_paths.add(attention)
                yield self._attention(path)

    def _check_per_head(self, attention: Attention) -> None:
        """Check that an attention module with split heads has no full parameter over all heads."""
        splits = self._splits.get(attention.path, {})
        full_rows = [
            name
            for name, parameter in attention.module.named_parameters(recurse=False)
            if name not in splits and parameter.ndim and len(parameter) in attention.counts
        ]
        if full_rows:
            raise ConfigError(
                f"the tensor-parallel plan of {type(self._model).__name__} splits the heads of "
                f"{attention.path} and not its {', '.join(full_rows)}, which belongs to all heads. "
                "Pass MegatronStrategy(sharding_plan=...) with a table of your own, or set "
                "tensor_model_parallel_size to 1."
            )

    def _add_head_norms(self, attention: Attention) -> None:
        """Declare the gradients of norms of heads partial, behind projections whose heads are
        split. Some models' plans omit these norms (Qwen3-VL-MoE).
        """
        head = attention.value("head_dim")
        for name, module in attention.module.named_children():
            path, own = (
                f"{attention.path}.{name}",
                f"{attention.path}.{name.partition('_')[0]}_proj",
            )
            row = self._rows.get(own)
            is_split = isinstance(row, KeyOrValue) or (
                isinstance(row, ColumnParallel) and not row.gather_output
            )
            sizes = {parameter.numel() for parameter in module.parameters()}
            if name.endswith("norm") and is_split and sizes == {head} and path not in self._rows:
                self._rows[path] = HeadParallel()

    def _add_activations(self) -> None:
        """Declare the gradients of activations with parameters partial, if the activation is
        between a column- and a row-parallel layer and therefore sees a rank's features. The models'
        plans omit these activations.
        """
        for path, module in self._modules.items():
            parent, _, own_name = path.rpartition(".")
            if own_name not in _ACTIVATIONS or path in self._rows:
                continue
            siblings = [
                self._rows.get(f"{parent}.{name}")
                for name, _ in self._modules[parent].named_children()
            ]
            numbers = [parameter.numel() for parameter in module.parameters()]
            if numbers and max(numbers) == 1 and _are_a_pair(siblings):
                self._rows[path] = HeadParallel()

    def _check_experts(self, entry: _Entry, splits: Mapping[str, Split]) -> None:
        """Check that no parameter of the experts would be added by every rank."""
        full_rows = [
            name
            for name, _ in self._modules[entry.path].named_parameters(recurse=False)
            if name not in splits
        ]
        if full_rows:
            raise ConfigError(
                f"the tensor-parallel plan of {type(self._model).__name__} splits the experts "
                f"{entry.path} and does not name their {', '.join(full_rows)}, which each of the "
                f"{self._size} ranks would use in full before their outputs are added. Set "
                "tensor_model_parallel_size to 1."
            )


def _are_a_pair(styles: Iterable[Style | None]) -> bool:
    """Return whether a layer begins a region of split features and a layer ends the region."""
    styles_found = list(styles)
    begins = any(
        isinstance(style, ColumnParallel) and not style.gather_output for style in styles_found
    )
    return begins and any(isinstance(s, RowParallel) and not s.split_input for s in styles_found)
