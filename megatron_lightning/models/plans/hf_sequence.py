"""Sequence parallelism of untouched ``transformers`` models.

Between the row-parallel end of a region of split features and the column-parallel beginning of the
next region a block has norms and sums of separate tokens. For these a rank needs only a shard of
the sequence (https://arxiv.org/abs/2205.05198): the all-reduce at the end of a region becomes a
reduce-scatter, and the next region begins with an all-gather.

    embedding | layers.0 scatters | norm, [attention], +, norm, [MLP], + … norm | gathers, head

Brackets are regions. A region gathers at the beginning. The modules tell the rows of a plan, but
not whether a block's forward mixes tokens outside of regions. Each family in :data:`FAMILIES` has
trained equally (docs/hf_coverage.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from megatron_lightning.layers.adapters.weight_adapters import HOOKS_OF_ADAPTERS
from megatron_lightning.layers.styles import (
    ColumnParallel,
    GatherSequence,
    HeadParallel,
    KeyOrValue,
    ParallelInput,
    RowParallel,
    SequenceParallel,
    SequenceRegion,
    ShardSequence,
    VocabParallel,
)
from megatron_lightning.parallel.shards.attachments import base_layer, without_attachments
from megatron_lightning.parallel.shards.sharding import Style

FAMILIES = frozenset({
    "apertus", "arcee", "cohere", "cohere2", "cohere_compass_text", "cwm", "ernie4_5",
    "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_neox", "granite",
    "helium", "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "ministral",
    "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3",
    "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2", "vaultgemma",
})  # fmt: skip
"""``model_type`` of configurations."""


class FullSequenceError(Exception):
    """Why each rank of a model has the activations of full sequences."""


def sequence_rows(model: nn.Module, rows: Mapping[str, Style]) -> dict[str, Style]:
    """Return the rows of a plan with rows for sequence parallelism.

    Args:
        model: The full model.
        rows: Module path -> style, without sequence parallelism.

    Raises:
        FullSequenceError: If activations cannot be sharded over the sequence.
    """
    config: Any = model.config
    if config.model_type not in FAMILIES or not _is_stock(model):
        raise FullSequenceError(
            f"{type(model).__name__} is not of a family whose blocks are known to treat each "
            "token separately outside of attention"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise FullSequenceError("its attention looks at later tokens")
    return _Sequence(model, rows).rows()


def _is_stock(model: nn.Module) -> bool:
    """Return whether ``transformers`` defines the model's code."""
    return type(model).__module__.startswith("transformers.models.")


class _Sequence:
    """The rows of a model, extended."""

    def __init__(self, model: nn.Module, rows: Mapping[str, Style]) -> None:
        self._model = model
        self._given = rows
        self._modules = {path: base_layer(child) for path, child in without_attachments(model)}
        prefix: Any = getattr(model, "base_model_prefix", "")
        self._base = prefix if prefix in self._modules else ""
        self._hidden_size: int = model.config.get_text_config().hidden_size  # type: ignore[union-attr, operator]

    def rows(self) -> dict[str, Style]:
        """Return the rows."""
        self._check_hooks()
        blocks = self._blocks()
        rows: dict[str, Style] = {self._base: SequenceRegion(), **self._ends()}
        for block in blocks:
            rows |= self._block_rows(block)
        rows[blocks[0]] = ShardSequence()
        remaining = [path for path in self._given if path not in rows]
        if remaining:
            raise FullSequenceError(f"{remaining[0]} lies outside of its blocks")
        return rows

    def _check_hooks(self) -> None:
        """Check that no hook of a user would see a shard."""
        for path, module in self._modules.items():
            forward = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            hooks = [hook for hook in forward if hook not in HOOKS_OF_ADAPTERS]
            hooks += module._backward_hooks.values()
            if path.startswith(f"{self._base}.") and (hooks or module._backward_pre_hooks):
                raise FullSequenceError(f"{path} has a hook, which would see a rank's part")

    def _children(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        prefix = f"{path}." if path else ""
        for name, _ in self._modules[path].named_children():
            if prefix + name in self._modules:
                yield prefix + name, self._modules[prefix + name]

    def _blocks(self) -> list[str]:
        """Return the paths of the blocks."""
        lists = [p for p, child in self._children(self._base) if isinstance(child, nn.ModuleList)]
        blocks = [path for path, _ in self._children(lists[0])] if len(lists) == 1 else []
        if not blocks:
            raise FullSequenceError("its blocks are not the items of a single list")
        return blocks

    def _ends(self) -> dict[str, Style]:
        """Return the rows of embeddings, the last norm and the output layer."""
        rows: dict[str, Style] = {}
        norms = []
        for path, child in self._children(self._base):
            if self._is_norm(child):
                norms.append(path)
            elif isinstance(child, nn.ModuleList) or not _has_parameters(child):
                continue
            elif isinstance(child, nn.Embedding):
                rows |= {path: self._given[path]} if path in self._given else {}
            else:
                raise FullSequenceError(f"{path} ({type(child).__name__}) is no block")
        if len(norms) != 1:
            raise FullSequenceError(f"it has {len(norms)} norms behind its blocks, not 1")
        rows[norms[0]] = GatherSequence()
        for path, style in self._given.items():
            is_outside = self._base and not path.startswith(f"{self._base}.")
            if is_outside and isinstance(self._modules[path], nn.Linear):
                gathers = getattr(style, "gather_output", False)
                rows[path] = VocabParallel(gather_output=gathers, shard_sequence=False)
        return rows

    def _block_rows(self, block: str) -> dict[str, Style]:
        """Return the rows of a block."""
        rows: dict[str, Style] = {}
        for path, child in self._children(block):
            if isinstance(child, nn.Dropout):
                if child.p:
                    raise FullSequenceError(f"{path} drops activations (p={child.p})")
            elif self._is_norm(child):
                rows[path] = SequenceParallel()
            elif _has_parameters(child):
                rows |= {path: ParallelInput(), **self._region(path)}
        return rows

    def _region(self, path: str) -> dict[str, Style]:
        """Return the rows inside of a region of split features."""
        modules_inside = {p: m for p, m in self._modules.items() if f"{p}.".startswith(f"{path}.")}
        styles = {p: self._given[p] for p in modules_inside if p in self._given}
        columns = [s for s in styles.values() if isinstance(s, ColumnParallel | KeyOrValue)]
        ends = [s for s in styles.values() if isinstance(s, RowParallel)]
        gathers = all(isinstance(s, ColumnParallel) and s.gather_output for s in columns)
        name = f"{path} ({type(self._modules[path]).__name__})"
        if not columns or len(ends) != 1 or ends[0].split_input != gathers:
            raise FullSequenceError(f"{name} does not lead from column- to row-parallel layers")
        for child_path, module in modules_inside.items():
            is_known = isinstance(
                styles.get(child_path), ColumnParallel | KeyOrValue | RowParallel | HeadParallel
            )
            # Between gathered and split features every rank computes the same.
            is_replicated = gathers and child_path not in styles and _is_vector(module)
            if not is_known and not is_replicated and _has_own_parameters(module):
                raise FullSequenceError(
                    f"every rank computes all of {child_path} ({type(module).__name__}) in {path}"
                )
        return {p: _inside(style) for p, style in styles.items()}

    def _is_norm(self, module: nn.Module) -> bool:
        """Return whether a module is a norm of the hidden states."""
        sizes = {tuple(p.shape) for p in module.parameters()}
        is_norm = sizes == {(self._hidden_size,)} or (not sizes and "Norm" in type(module).__name__)
        return is_norm and not any(True for _ in module.children())


def _inside(style: Style) -> Style:
    """Return the style of a layer whose region has copied or gathered the input."""
    if isinstance(style, ColumnParallel):
        return replace(style, copy_input=False)
    return replace(style, copy_input=False) if isinstance(style, KeyOrValue) else style


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_vector(module: nn.Module) -> bool:
    return all(parameter.ndim == 1 for parameter in module.parameters(recurse=False))
