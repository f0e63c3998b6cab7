"""The door of a model whose rows context-parallel ranks share: full rows up to the first block, a
rank's part behind.

What a model computes once a row (positions, rotary tables, masks, biases) stays what it is in one
process. Before the first step the model is probed, and its modules are bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lightning.config import ContextMixers
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.shared_rows.conditions import (
    dropout_of,
    evaluating,
    exact_products,
    has_16_bits,
    is_close,
    plain_attributes,
    small_windows,
)
from megatron_lightning.layers.shared_rows.full_arguments import FullArguments, Origins
from megatron_lightning.layers.shared_rows.kinds import check_patterns, kinds_for
from megatron_lightning.layers.shared_rows.media import Media
from megatron_lightning.layers.shared_rows.mixers import SharedMixer, SharingRanks
from megatron_lightning.layers.shared_rows.places import changed
from megatron_lightning.layers.shared_rows.probe import Block, Findings, Probe
from megatron_lightning.layers.shared_rows.probed_call import (
    ProbedCall,
    RunOnStages,
    probed_length,
    tried,
)
from megatron_lightning.layers.shared_rows.ring import RingMixer, leave_masks_out
from megatron_lightning.parallel.collectives import all_reduce
from megatron_lightning.parallel.grid.context import AxisGroup

Apart = Callable[[], AbstractContextManager[None]]
_MASK = "attention_mask"
_SEEDS = (7, 8)
"""Rows that are probed, and rows that are compared with the call of one process."""


@dataclass
class SharedRows:
    """Forward pre-hook of a model of ``transformers``. Its calls get a rank's part, or full rows.

    Args:
        ranks: The context-parallel ranks.
        others: Groups that together join all ranks of a pipeline stage, which find the same.
        mixers: Which ways are taken, see
            :attr:`~megatron_lightning.config.ContextOptions.mixers`.
        pp: Ranks of the pipeline's stages. None: a rank has all blocks.
    """

    ranks: SharingRanks
    others: tuple[AxisGroup, ...]
    mixers: ContextMixers
    pp: AxisGroup | None = None
    replica: tuple[AxisGroup, ...] = ()
    """Groups that together join the ranks whose calls need one another. Empty: all ranks."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Path of a module that mixes tokens -> the way in which it works on a rank's part."""
    _length: int | None = None
    _is_probed: bool = False
    _device: torch.device | None = None
    _media: Media | None = None
    """None: rows hold text alone."""

    _apart: Apart | None = None

    def __post_init__(self) -> None:
        self._full = FullArguments(self.ranks, self.kinds)

    @contextmanager
    def rows_of(
        self, length: int | None, origins: Origins | None = None, apart: Apart | None = None
    ) -> Iterator[None]:
        """Context of a step, with rows of ``length`` tokens. None: of calls that are not divided.

        Args:
            length: Tokens of a full row.
            origins: Where tensors of the batch come from. None: unknown.
            apart: Context of calls that are none of the step's, for which the ranks of all replicas
                gather weights. None: a replica calls alone.
        """
        before = self._length, self._full.origins, self._apart
        self._length, self._full.origins, self._apart = length, origins or Origins(), apart
        try:
            yield
        finally:
            self._length, self._full.origins, self._apart = before

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of full rows.

        Raises:
            ConfigError: If the model is called outside of a step, or with arguments of unknown
                meaning, or its modules cannot be shared.
        """
        if self._is_probed and self._length is None:
            raise ConfigError(
                f"{type(module).__name__}, whose rows the ranks of context_parallel_size share, "
                "was called outside of a training, validation, test or predict step. Call it in a "
                "step, or load a checkpoint into a model of its own."
            )
        if self._length is None:
            return None  # a probe
        given = self._full.of(module, args, kwargs, self._length)
        if self._media is not None:
            full = partial(self.rows_of, None, apart=self._apart)
            with (self._apart or nullcontext)():
                self._media.begin(given, self._length, full)
            self.kinds |= self._media.kinds
        return (), given

    def divided(
        self, block: Block, args: Any, kwargs: Any, length: int | None = None
    ) -> tuple[Any, Any]:
        """Return the arguments of a block, with the rank's part of what runs over the tokens.

        Args:
            block: The block.
            args: Its arguments.
            kwargs: Its arguments by name.
            length: Tokens of a full row. None: those of the step.

        Raises:
            ConfigError: If there is a tensor that the probe has not seen.
        """
        length, part = length or self._length, self.ranks.part
        if length is None:
            return args, kwargs

        def split(place: str, tensor: Tensor) -> Tensor:
            dim = block.divided.get(place)
            if place not in block.seen and not place.endswith(f"['{_MASK}']"):
                raise ConfigError(
                    f"{block.path} got an argument ({place}) that it did not get when the ranks of "
                    "context_parallel_size looked for what mixes tokens. Pass the same arguments "
                    "in every step, or set context_parallel_size to 1."
                )
            is_full = dim is not None and tensor.shape[dim] == length
            return part.split(tensor, dim) if is_full and dim is not None else tensor

        divided: tuple[Any, Any] = changed((args, kwargs), split)
        return divided

    # ---------------------------------------------------------------------------------------- probe

    def find(self, model: nn.Module, run: RunOnStages | None = None) -> bool:
        """Probe the model, bind its modules, and compare the whole call. Return whether that was
        still to be done. A collective of all ranks.

        Args:
            model: The model.
            run: Calls the model on all pipeline stages. None: a rank has all blocks.

        Raises:
            ConfigError: If a module cannot be shared, or the whole call differs.
        """
        if self._is_probed:
            return False
        length = probed_length(model, self.ranks.group.size, self.pp)
        call = ProbedCall(model, length, run, takes_media=self.ranks.takes_media)
        self._device = call.device
        # In the precision of the weights: autocast would hide what differs. Uncompiled, since hooks
        # see the calls.
        with (
            torch.autocast(call.device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
            torch.no_grad(),
            evaluating(model),
            small_windows(model),
            exact_products(),
        ):
            before = plain_attributes(model)
            probe = Probe(model, length, self.ranks, self._agree, self._kinds_for)
            findings = probe.run(lambda: call(_SEEDS[0]))
            expected = call(_SEEDS[1])
            noise = call.noise(_SEEDS[1], expected) if has_16_bits(model) else 0.0
            # An error on one stage would leave the others waiting.
            documents = () if run is not None else (call.alone, call.packed)
            alone, together = (*(tried(c, _SEEDS[1])[0] for c in documents), None, None)[:2]
            self._check_unchanged(model, before)
            self._bind(model, findings, probe)
            check_patterns(self.mixers, self.kinds)
            self._is_probed = True
            with self.rows_of(length):
                self._compare(model, call, expected, noise)
                if alone is not None and self._agree(is_close(together, alone, 3 * noise)):
                    self._compare_documents(call, alone, noise)
        _check_dropout(model, self.kinds)
        return True

    def _kinds_for(self, path: str) -> Sequence[type[SharedMixer]]:
        """Return the ways to try for a module."""
        return kinds_for(self.mixers, path)

    def _check_unchanged(self, model: nn.Module, before: Mapping[str, object]) -> None:
        """Check that short rows have not switched a model to other code. A collective.

        Raises:
            ConfigError: If an attribute of a module has changed since ``before``.
        """
        now = plain_attributes(model)
        changes = [name for name, value in before.items() if now.get(name) != value]
        if not self._agree_on_stages(not changes):
            path = changes[0] if changes else "a module of another stage"
            raise ConfigError(
                f"{path} of {type(model).__name__} was {before.get(path)!r} and is "
                f"{now.get(path)!r} after a call with short rows, by which ranks that share rows "
                "find what mixes tokens: longer rows run other code, which they would not see. "
                "Set it in the model's configuration to a value that calls do not change, or "
                "context_parallel_size to 1."
            )

    def _bind(self, model: nn.Module, findings: Findings, probe: Probe) -> None:
        for block in findings.blocks:
            module = model.get_submodule(block.path)
            module.register_forward_pre_hook(_Divide(self, block), with_kwargs=True)
        slots = {p: way.bind(model.get_submodule(p)) for p, way in findings.mixers.items()}
        own = {path: way.kind for path, way in findings.mixers.items()}
        of_stages = [own] if self.pp is None else self.pp.all_gather_object(own)
        known = {path: kind for stage in of_stages for path, kind in stage.items()}
        self.kinds |= {path: known[path] for path, _ in model.named_modules() if path in known}
        if self.ranks.takes_media:
            blocks = {block.path: block for block in findings.blocks}
            agree = self._agree_in_replica
            later = Probe(model, probe.length, self.ranks, agree, self._kinds_for)
            self._media = Media(model, self.ranks, later, agree, blocks, slots, self.divided)
            self._media.bind()
            return
        rings = {path for path, kind in known.items() if kind == RingMixer.kind}
        self._full.keeps_masks = not leave_masks_out(model, rings)

    def _compare(
        self, model: nn.Module, call: ProbedCall, expected: Tensor | None, noise: float
    ) -> None:
        found, finding = tried(call, _SEEDS[1])
        part = None if expected is None else self.ranks.part.split(expected, 1)
        is_equal = part is None or is_close(found, part, 3 * noise)
        if not self._agree_on_stages(is_equal and not finding):
            if part is None or expected is None:
                finding = finding or "the last stage has other logits"
            else:
                finding = finding or f"{list(part.shape)} of {list(expected.shape)} differ"
            raise ConfigError(
                f"{type(model).__name__} does not give on ranks that share rows what it gives in "
                f"one process ({finding}): code between or behind its blocks uses full rows. Set "
                "context_parallel_size to 1."
            )

    def _compare_documents(self, call: ProbedCall, alone: Tensor, noise: float) -> None:
        """Find whether documents within a row are kept apart, as each document alone."""
        self._full.parts_documents = True  # lets the positions through
        found, _ = tried(call.packed, _SEEDS[1])
        part = self.ranks.part.split(alone, 1)
        self._full.parts_documents = self._agree(is_close(found, part, 3 * noise))

    def _agree(self, value: bool) -> bool:
        return self._agree_in(self.others, value)

    def _agree_in_replica(self, value: bool) -> bool:
        """Replicas may have other numbers of calls, as in predictions."""
        alone = self.replica if self._apart is None else ()
        return self._agree_in(alone or self.others, value)

    def _agree_on_stages(self, value: bool) -> bool:
        pp = () if self.pp is None else (self.pp,)
        return self._agree_in((*self.others, *pp), value)

    def _agree_in(self, groups: tuple[AxisGroup, ...], value: bool) -> bool:
        failures = torch.tensor([float(not value)], device=self._device)
        for group in groups:
            failures = all_reduce(failures, group, "max")
        return not failures.item()


@dataclass
class _Divide:
    """Forward pre-hook of a block."""

    shared: SharedRows
    block: Block

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.shared.divided(self.block, args, kwargs)


def shared_models(module: nn.Module) -> dict[str, SharedRows]:
    """Return path -> hook of the models in ``module`` whose rows ranks share."""
    return {
        path: hook
        for path, child in module.named_modules()
        for hook in child._forward_pre_hooks.values()
        if isinstance(hook, SharedRows)
    }


def found_mixers(module: nn.Module) -> dict[str, str]:
    """Return path -> way of the modules in ``module`` that mix the tokens of shared rows."""
    return {
        f"{path}.{mixer}" if path else mixer: kind
        for path, shared in shared_models(module).items()
        for mixer, kind in shared.kinds.items()
    }


def _check_dropout(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Refuse dropout in modules that mix tokens: ranks would drop different weights.

    Raises:
        ConfigError: If a module drops.
    """
    for path in kinds:
        if rate := dropout_of(model.get_submodule(path)):
            raise ConfigError(
                f"{path} has dropout of {rate}, which cannot be combined with "
                "context_parallel_size above 1: ranks that share rows would drop different "
                "values. Set it to 0."
            )
