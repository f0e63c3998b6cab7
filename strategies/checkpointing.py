"""Between Lightning's checkpoint, one nested dict, and our sharded directories.

Lightning builds the dict on every rank with that rank's part of the module in it. Tensors of the module, of the optimizers and
of callbacks that keep copies of the module are saved by global name, so any layout reads them; the rest comes from rank 0, plus
what ranks have of their own (random states, states of data loaders) under ``"megatron_lightning"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_lightning.checkpoint import (
    TensorShards,
    load_sharded,
    open_checkpoint,
    stands_for,
)
from megatron_lightning.checkpoint.agreement import ALONE, together
from megatron_lightning.checkpoint.naming import holds_tensors
from megatron_lightning.checkpoint.saving import Snapshot, take_snapshot, write_snapshot
from megatron_lightning.checkpoint.source import CheckpointSource, PlainSource
from megatron_lightning.errors import CheckpointError
from megatron_lightning.optim.distributed import DistributedOptimizer
from megatron_lightning.optim.fully_sharded import local_rows
from megatron_lightning.optim.group_names import groups_of_rank, merge_groups
from megatron_lightning.optim.state import StateTensor
from megatron_lightning.parallel.context import AxisGroup
from megatron_lightning.parallel.sharding import ShardSpec
from megatron_lightning.strategies.gradients import unwrapped
from megatron_lightning.strategies.lightning_internals import attached_trainer
from megatron_lightning.strategies.local_copies import copy_plan, open_copy
from megatron_lightning.strategies.progress import RunProgress
from megatron_lightning.strategies.remembered import RememberedCheckpoints, checkpoint_callbacks
from megatron_lightning.strategies.saver import Save, Saver
from megatron_lightning.strategies.vocabulary import fit_vocabulary, vocabulary_parameters

if TYPE_CHECKING:
    from megatron_lightning.strategies.checkpoint_hooks import MegatronCheckpoints


class CheckpointGlue:
    """Saves and loads the checkpoints of one strategy.

    Args:
        strategy: Whose state it is.
        saver: Writes them.
    """

    def __init__(self, strategy: MegatronCheckpoints, saver: Saver) -> None:
        self._strategy, self.saver, self.progress = strategy, saver, RunProgress(strategy)
        self.remembered = RememberedCheckpoints(self._callbacks)  # a method: spawned workers get it
        self._source: CheckpointSource | None = None
        self._path, self._is_plain = "", False

    def _callbacks(self) -> list[Any]:
        module = self._strategy.lightning_module  # none is needed to delete a checkpoint
        return checkpoint_callbacks(None if module is None else attached_trainer(module))

    # ------------------------------------------------------------------------------------------------------ save

    def save(
        self, checkpoint: dict[str, Any], path: str, *, background: bool = False, links: Sequence[Path] | None = None
    ) -> None:
        """Write ``checkpoint`` as a directory, in the background if wanted; all ranks call this.

        Args:
            checkpoint: Lightning's dict.
            path: The directory.
            background: Whether to return when the state is copied.
            links: Where links are that wait for the commit; on the first rank.

        Raises:
            CheckpointError: On every rank, if one of them failed; what stood under ``path`` before is intact.
        """
        context = self._strategy.context
        tensors, rest = self._divide(checkpoint)
        info = {"layout": asdict(context.layout), "consumed_samples": self._strategy.consumed_samples}
        info |= {"world_size": context.world_size, "global_step": rest.get("global_step"), "epoch": rest.get("epoch")}
        info["tied"] = dict(self._strategy.assembly.tied)
        config = getattr(self._strategy.module, "config", None)
        if is_dataclass(config) and not isinstance(config, type):
            info["config"] = asdict(config)

        def take(group: AxisGroup) -> Snapshot:
            self.remembered.begin(rest.get("callbacks", {}))
            return take_snapshot(path, tensors, rest, info=info, group=group)

        plan = Save(path, take, write_snapshot, links=links, settled=lambda committed: self._settled(path, committed))
        self.saver.save(plan, context, background=background)

    def _settled(self, path: str, committed: bool) -> None:
        self.remembered.settle(path, committed=committed)
        if not committed:
            self.saver.spare(self.remembered.keeps)

    def save_local(self, checkpoint: dict[str, Any], path: str, folder: str) -> None:
        """Write every rank's part to its node's own disk and the next node's, and the pointer ``path``; in the background.

        Raises:
            CheckpointError: On every rank, if this save, or the one before, failed on one of them; older copies are intact.
        """
        tensors, rest = self._divide(checkpoint)
        local, tied = self._strategy.module.state_dict(), self._strategy.assembly.tied
        tensors += [self._shards(f"state_dict.{tied[name]}", name, local[name]) for name in tied if name in local]
        plan = copy_plan(self._strategy, tensors, rest, path=path, folder=folder)
        self.saver.save(plan, self._strategy.context, background=True)

    def _divide(self, checkpoint: dict[str, Any]) -> tuple[list[TensorShards], dict[str, Any]]:
        """Return what this rank holds of the tensors, and the rest."""
        self._strategy.share_buffers(newly=True)  # replicas write parts of a tensor each
        rest = self.progress.added_to(checkpoint)
        optimizers = [self._view(optimizer) for optimizer in rest.pop("optimizer_states", [])]
        tensors = list(self._module_shards(rest))
        for index, optimizer in enumerate(optimizers):
            tensors += [_state_shards(f"optimizer_states.{index}.state", state) for state in optimizer.state_tensors()]
        if optimizers:
            groups = self._merged_groups(optimizers)
            rest["optimizer_states"] = [
                {"state": optimizer.plain_state(), "param_groups": mine}
                for optimizer, mine in zip(optimizers, groups, strict=True)
            ]
        return tensors, rest

    def _module_shards(self, rest: dict[str, Any]) -> Iterator[TensorShards]:
        """Take every dict of tensors by module name out of ``rest``."""
        for key, value in list(rest.items()):
            if not (isinstance(value, Mapping) and holds_tensors(key, value)):
                continue
            tensors = {name: tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
            rest[key] = self._merged_over_stages({name: x for name, x in value.items() if not isinstance(x, Tensor)})
            for name, tensor in tensors.items():
                if name not in self._strategy.assembly.tied:
                    yield self._shards(f"{key}.{name}", name, tensor)

    def _merged_over_stages(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Return what the pipeline ranks have beside tensors (extra states of their layers), put together."""
        ranks = self._strategy.context.pp.all_gather_object(entries)
        return {name: value for rank in reversed(ranks) for name, value in rank.items()}

    def _spec(self, name: str, tensor: Tensor) -> ShardSpec:
        specs, tied = self._strategy.assembly.specs, self._strategy.assembly.tied
        spec = specs.get(name) or specs.get(tied.get(name, ""))  # a copy that is the owner's tensor has no spec of its own
        return spec if spec is not None and spec.local_shape == tuple(tensor.shape) else ShardSpec.replicated(tensor.shape)

    def _shards(self, saved_as: str, name: str, tensor: Tensor) -> TensorShards:
        """Describe one of the module's tensors: its tensor-parallel part, or with FSDP rows of that, and who else holds it."""
        spec, context = self._spec(name, tensor), self._strategy.context
        replicated = () if self._strategy.assembly.in_unit(name) else ("pp",)
        writes = stands_for(spec, context, replicated_over=replicated)
        if isinstance(tensor, DTensor):
            rows, start = local_rows(tensor)
            replicas = self._strategy.sharded_units.groups.replicas
            return TensorShards.flat(saved_as, spec, rows, start, writes=writes, replicas=replicas)
        return TensorShards.local(saved_as, spec, tensor, writes=writes, replicas=context.data_group(spec.grid))

    def _view(self, optimizer: Any) -> DistributedOptimizer:
        """Return the optimizer as checkpoints see it."""
        if not isinstance(optimizer, _OptimizerHandle):
            raise CheckpointError("optimizer_states of the checkpoint were replaced by a hook; leave them to the strategy.")
        return self._strategy.gradient_flow.view(optimizer.optimizer)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return what stands for an optimizer's state in the dict that Lightning hands to hooks."""
        return _OptimizerHandle(unwrapped(optimizer))

    def _merged_groups(self, optimizers: Sequence[DistributedOptimizer]) -> list[list[dict[str, Any]]]:
        """Return each optimizer's parameter groups with the names of all pipeline ranks, in the whole model's order."""
        ranks = self._strategy.context.pp.all_gather_object([optimizer.param_groups() for optimizer in optimizers])
        place = {name: position for position, name in enumerate(self._strategy.assembly.names)}
        return [merge_groups([rank[index] for rank in ranks], place) for index in range(len(optimizers))]

    # ------------------------------------------------------------------------------------------------------ load

    def load(self, path: str) -> dict[str, Any]:
        """Return Lightning's checkpoint with this rank's part of the module; all ranks call this.

        Optimizer states are read later, by :meth:`load_optimizers`, into the optimizers' own tensors.

        Raises:
            CheckpointError: On every rank: for what is missing, unexpected, misshaped or damaged.
        """
        module = self._strategy.module
        group = self._strategy.context.axis("world")
        source = open_copy(self._strategy, path, self.saver) or open_checkpoint(path, group=group)
        self._source, self._path, self._is_plain = self._fitted(source), path, isinstance(source, PlainSource)
        checkpoint = self._source.state()
        local = module.state_dict()
        others = {name: value for name, value in checkpoint.get("state_dict", {}).items() if name in local}
        checkpoint["state_dict"] = {**others, **self._load_module(module.strict_loading)}
        for key, names in self._tensor_dicts().items():
            checkpoint[key] = {**checkpoint.get(key, {}), **self._load_copies(key, names)}
        self.progress.take_from(checkpoint)
        return checkpoint

    @property
    def source(self) -> CheckpointSource:
        """The checkpoint being loaded.

        Raises:
            CheckpointError: If none is.
        """
        if self._source is None:
            raise CheckpointError("no checkpoint is being loaded.")
        return self._source

    def _fitted(self, source: CheckpointSource) -> CheckpointSource:
        """Let a vocabulary of another size look like the model's, if that is wanted."""
        strategy = self._strategy
        specs, tied = strategy.assembly.specs, strategy.assembly.tied
        shapes = {}
        for name in vocabulary_parameters(strategy.module, strategy.sharding_plan, {**specs, **tied}):
            owner = tied.get(name, name)
            spec = specs.get(name) or specs.get(owner)
            if spec is not None:
                shapes[name] = shapes[owner] = spec.global_shape
        return fit_vocabulary(source, shapes, strategy.context, resize=strategy.checkpoint_options.resize_vocabulary)

    def _load_module(self, strict: bool) -> dict[str, Tensor]:
        """Read this rank's part of the module into its own tensors, which needs no further memory."""
        local = {name: t for name, t in self._strategy.module.state_dict().items() if isinstance(t, Tensor)}
        stored, tied = self.source.tensors(), self._strategy.assembly.tied
        shards = []
        for name, tensor in local.items():
            saved_as = name if f"state_dict.{name}" in stored else tied.get(name, name)
            shards.append(self._shards(f"state_dict.{saved_as}", name, tensor))
        shards += [_nothing(f"state_dict.{copy}", stored) for copy in tied if f"state_dict.{copy}" in stored]
        load_sharded(self.source, shards, prefix="state_dict.", strict=strict, group=self._strategy.context.axis("world"))
        return local

    def _tensor_dicts(self) -> dict[str, list[str]]:
        """Return key -> names of the dicts of tensors other than the module and the optimizers."""
        found: dict[str, list[str]] = {}
        for full in self.source.tensors():
            key, _, name = full.partition(".")
            if key not in ("state_dict", "optimizer_states"):
                found.setdefault(key, []).append(name)
        return found

    def _load_copies(self, key: str, names: Sequence[str]) -> dict[str, Tensor]:
        """Read the local parts of tensors named like the module's, and all of the others."""
        local = self._strategy.module.state_dict()
        elsewhere = set(self._strategy.assembly.names) - set(local)
        stored = self.source.tensors()
        fresh = {}
        for name in names:
            if name in local:
                fresh[name] = local[name].clone()
            elif name not in elsewhere:
                info = stored[f"{key}.{name}"]
                fresh[name] = torch.empty(info.shape, dtype=info.dtype, device=self._strategy.root_device)
        shards = [self._shards(f"{key}.{name}", name, tensor) for name, tensor in fresh.items()]
        load_sharded(self.source, shards, prefix=f"{key}.", strict=False, group=self._strategy.context.axis("world"))
        for copy, owner in self._strategy.assembly.tied.items():
            if copy in local and owner in fresh:
                fresh.setdefault(copy, fresh[owner])
        return fresh

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Copy the loaded part into the module, of its metrics what this replica goes on with."""
        self._strategy.module.load_state_dict(self.progress.module_state(checkpoint["state_dict"]), strict=strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Read the optimizer states into the optimizers' tensors; all ranks call this."""
        strategy = self._strategy
        checkpoint = self._with_named_parameters(checkpoint)
        views = [strategy.gradient_flow.view(optimizer) for optimizer in strategy.optimizers]
        states = checkpoint["optimizer_states"]
        if not states and views:  # as Lightning has it: the states were left out on purpose
            rank_zero_warn("the checkpoint has no optimizer states: the optimizers begin anew.")
            views = []
        together(strategy.context.axis("world"), "loading the optimizers", lambda: _check_optimizers(views, states))
        for index, (view, saved) in enumerate(zip(views, states, strict=True)):
            prefix = f"optimizer_states.{index}.state."
            described = {}
            for full, info in self.source.tensors().items():
                if full.startswith(prefix):
                    name, _, key = full[len(prefix) :].rpartition(".")
                    described[name, key] = (info.shape, info.dtype)
            view.load_param_groups(groups_of_rank(view.param_groups(), saved["param_groups"]))
            shards = [_state_shards(prefix[:-1], state) for state in view.allocate_state(described)]
            view.load_plain_state(saved["state"])
            load_sharded(self.source, shards, prefix=prefix, strict=True, group=strategy.context.axis("world"))
            view.finish_restore()
        self._source = None
        self.progress.restore_random_state()

    def _with_named_parameters(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open a plain file once more, now that the optimizers exist whose parameters it numbers."""
        strategy = self._strategy
        if not self._is_plain or not checkpoint["optimizer_states"]:
            return checkpoint
        views = [strategy.gradient_flow.view(optimizer) for optimizer in strategy.optimizers]
        order = [[name for group in groups for name in group["params"]] for groups in self._merged_groups(views)]
        self._source = self._fitted(
            open_checkpoint(self._path, optimizer_parameters=order, group=strategy.context.axis("world"))
        )
        return self._source.state()


class _OptimizerHandle(dict[str, Any]):
    """Stands for an optimizer's state between Lightning's dump and our save."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.state_dict())
        self.optimizer = optimizer


def _check_optimizers(views: Sequence[DistributedOptimizer], saved: Sequence[Mapping[str, Any]]) -> None:
    """Check that no optimizer, and no parameter of one, would silently begin anew."""
    if len(views) != len(saved):
        raise CheckpointError(
            f"the checkpoint holds the states of {len(saved)} optimizers, and the model has {len(views)}. "
            "Return as many from configure_optimizers, or load the weights alone."
        )
    for view, state in zip(views, saved, strict=True):
        known = {name for group in state["param_groups"] for name in group["params"]}
        new = [name for group in view.param_groups() for name in group["params"] if name not in known]
        if known and new:
            more = f" and {len(new) - 8} more" if len(new) > 8 else ""
            raise CheckpointError(
                f"{type(view.optimizer).__name__} has parameters of which the checkpoint's optimizer knows nothing: "
                f"{', '.join(new[:8])}{more}. Resume with the parameters it was saved with, or load the weights alone."
            )


def _state_shards(prefix: str, state: StateTensor) -> TensorShards:
    name, replicas = f"{prefix}.{state.name}.{state.key}", state.replicas or ALONE
    return TensorShards(name, state.global_shape, state.dtype, state.pieces, state.writes, replicas)


def _nothing(name: str, stored: Mapping[str, Any]) -> TensorShards:
    """Return a request that mentions a tensor without reading it."""
    return TensorShards(name, stored[name].shape, stored[name].dtype, [])
