"""Write inputs, outputs, gradients and weights of a step, under one device's names and shapes on
any layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from megatron_lightning.assembly.state.full_state import CollectedTensors
from megatron_lightning.callbacks.dumps.files import save_dump
from megatron_lightning.callbacks.dumps.parameters import deal_chunks, gradients_of, weights_of
from megatron_lightning.callbacks.dumps.placement import Features, Placement
from megatron_lightning.callbacks.dumps.recorder import Recorder
from megatron_lightning.errors import ConfigError
from megatron_lightning.file_names import DUMP
from megatron_lightning.optional import require
from megatron_lightning.parallel.grid.context import ParallelContext
from megatron_lightning.parallel.shards.spec import ShardSpec
from megatron_lightning.parallel.shards.tensor_shards import TensorShards
from megatron_lightning.strategies.trainer_ranks import context_of, run_of, specs_of

Kind = Literal["inputs", "outputs", "gradients", "weights"]


class DumpTensors(pl.Callback):
    """Write tensors of training steps to ``FOLDER/step-N/dump.safetensors``, full and under the
    names of one device on any layout. ``megatron-lightning convert compare-dumps A B`` names the
    first module that differs.

    Entries are ``outputs/model.layers.0``, ``gradients/model.layers.0.mlp.linear_fc1.weight`` and
    so on. A further tensor of a call has a number behind its name. Rows of activations are in the
    order of one device's batch. A tensor of a layer without a known place on the layout (inside of
    dispatched experts, between split layers) is left out, and a warning names its module. So is a
    tensor of which data-parallel ranks have other lengths.

    Args:
        modules: Patterns of module names, such as ``model.layers.*``. A ``*`` also matches dots.
        steps: Optimizer steps done at the begin of the dumped steps.
        what: Kinds of tensors. Gradients are reduced, and not clipped yet. Weights are those of the
            forward.
        folder: None: ``dumps`` in the Trainer's ``default_root_dir``.

    Raises:
        ConfigError: If a value cannot be used, or no module matches.
    """

    def __init__(
        self,
        modules: Sequence[str] = ("*",),
        steps: Sequence[int] = (0,),
        what: Sequence[Kind] = ("inputs", "outputs", "gradients", "weights"),
        folder: str | Path | None = None,
    ) -> None:
        wrong = [kind for kind in what if kind not in get_args(Kind)]
        if wrong or not what:
            raise ConfigError(f"what is {list(what)}: choose some of {list(get_args(Kind))}.")
        if not steps or min(steps) < 0:
            raise ConfigError(f"steps is {list(steps)}: name steps from 0 on, such as [0, 1].")
        self.modules = tuple(modules)
        self.steps = frozenset(steps)
        self.what = tuple(what)
        self.folder = folder
        self._recorder: Recorder | None = None
        self._step = -1
        self._batch: Any = None
        self._found: dict[str, TensorShards] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_recorder": None, "_batch": None, "_found": {}}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to record, and take the weights. All ranks call this."""
        if trainer.global_step not in self.steps or self._recorder is not None:
            return
        require("safetensors", "DumpTensors")
        chosen = {name: module for name, module in pl_module.named_modules() if self._matches(name)}
        self._check(trainer, pl_module, chosen)
        self._step, self._batch, self._found = trainer.global_step, batch, {}
        self._recorder = Recorder(chosen, self.what)
        deal_chunks(trainer, deals=False)  # places of tokens are those of rows of one document
        if "weights" in self.what:
            for name, shards in weights_of(trainer, pl_module).items():
                self._take(f"weights/{name}", shards)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take the gradients."""
        if self._recorder is not None and "gradients" in self.what:
            for name, shards in gradients_of(trainer, pl_module).items():
                self._take(f"gradients/{name}", shards)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write the dump after the step. All ranks call this."""
        recorder = self._recorder
        if recorder is not None and trainer.global_step != self._step:
            self._recorder = None
            deal_chunks(trainer, deals=True)
            self._write(recorder, trainer, pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Take the hooks away."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            deal_chunks(trainer, deals=True)

    def _matches(self, name: str) -> bool:
        return bool(name) and any(fnmatchcase(name, pattern) for pattern in self.modules)

    def _check(
        self, trainer: pl.Trainer, module: pl.LightningModule, chosen: Mapping[str, nn.Module]
    ) -> None:
        if not trainer.strategy.reduce_boolean_decision(bool(chosen), all=False):
            some = [name for name, _ in module.named_modules() if name][:8]
            raise ConfigError(
                f"modules is {list(self.modules)}, which no module of {type(module).__name__} "
                f"matches. It has {', '.join(some)}, …"
            )

    def _take(self, entry: str, shards: TensorShards) -> None:
        name = entry.partition("/")[2]
        if self._matches(name.rpartition(".")[0] or name):  # one of the LightningModule itself
            copies = [shard._replace(data=shard.data.detach().clone()) for shard in shards.shards]
            self._found[entry] = TensorShards(
                entry, shards.global_shape, shards.dtype, copies, shards.writes, shards.replicas
            )

    def _write(self, recorder: Recorder, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Collect the tensors on the first rank, and write them. All ranks call this."""
        recorder.close()
        context = context_of(trainer, "DumpTensors")
        unplaced = self._place(recorder, trainer, module, context)
        collected = CollectedTensors(context, self._found, sorted(unplaced))
        left_out = sorted({name for names in collected.notes for name in names})
        if left_out:
            rank_zero_warn(
                f"DumpTensors leaves out the activations of {', '.join(left_out[:5])}"
                f"{', …' if len(left_out) > 5 else ''}: this layout does not say where their "
                "entries lie in the tensor of one device. Dump the module around them, or run on "
                "one device."
            )
        incomplete = collected.incomplete
        if incomplete:
            rank_zero_warn(
                f"DumpTensors leaves out {len(incomplete)} tensors, such as {incomplete[0]}: the "
                "ranks' parts do not make up one tensor. Batches of other lengths or sizes on the "
                "data-parallel ranks have none: set the data module's pad_to to sequence_length, "
                "or packing."
            )
        full = {}
        for name in collected.collected:
            if name in incomplete:
                continue
            tensor = collected.tensor(name)
            if trainer.is_global_zero:
                full[name] = tensor.cpu()
        if trainer.is_global_zero:
            folder = Path(self.folder or Path(trainer.default_root_dir) / "dumps")
            run = run_of(trainer)
            names = module.state_dict() if run is None else run.part.names
            save_dump(folder / f"step-{self._step}" / DUMP, full, names)
        self._found, self._batch = {}, None

    def _place(
        self,
        recorder: Recorder,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        context: ParallelContext,
    ) -> set[str]:
        """Describe the recorded activations as shards. Return modules without a known place."""
        specs, unplaced = specs_of(trainer), set()
        for (kind, name), calls in recorder.calls.items():
            if not calls:
                continue
            child = module.get_submodule(name)
            for number, tensors in enumerate(zip(*calls, strict=False)):
                entry = f"{kind}/{name}" + (f".{number}" if number else "")
                placement = _placement(trainer, module, self._batch, len(calls))
                features = Features.of(child, kind, specs.get(f"{name}.weight"))
                is_known = context.tp.size == 1 or _is_whole(child, name, specs)
                placed = placement.shards(tensors, features) if is_known else None
                if placed is None:
                    unplaced.add(name)
                    continue
                shape, shards = placed
                on_device = [s._replace(data=s.data.to(context.device)) for s in shards]
                self._found[entry] = TensorShards(entry, shape, tensors[0].dtype, on_device)
        return unplaced


def _is_whole(module: nn.Module, name: str, specs: Mapping[str, ShardSpec]) -> bool:
    """Return whether inputs and outputs of a module have full features, or a linear layer's: a
    module without weights may lie between split layers, and experts see their own tokens.
    """
    inside = [spec for key, spec in specs.items() if key.startswith(f"{name}.")]
    return bool(inside) and not all(spec.is_expert for spec in inside)


def _placement(
    trainer: pl.Trainer, module: pl.LightningModule, batch: Any, num_calls: int
) -> Placement:
    """Describe the rank's part of a batch, of which a module has seen ``num_calls`` equal parts."""
    run, context = run_of(trainer), context_of(trainer, "DumpTensors")
    tensors = [value for value in tree_leaves(batch) if isinstance(value, Tensor) and value.dim()]
    rows = len(tensors[0]) if tensors else 0
    plans = () if run is None else run.part.plans.applied.values()
    return Placement(
        context,
        rows=rows * trainer.accumulate_grad_batches // num_calls,
        length=_length(module, batch, tensors),
        sequence_dims=tuple(dict.fromkeys([*(plan.sequence_dim for plan in plans), 1])),
        divides_sequence=run is not None and run.part.shards_sequence,
    )


def _length(module: pl.LightningModule, batch: Any, tensors: Sequence[Tensor]) -> int:
    """Return the positions of a batch's sequences: of a declared entry, or of the longest dim 1."""
    for key, dim in (getattr(module, "sequence_dims", None) or {}).items():
        value = batch.get(key) if isinstance(batch, Mapping) else None
        if isinstance(value, Tensor):
            return int(value.shape[dim])
    return max((tensor.shape[1] for tensor in tensors if tensor.dim() > 1), default=0)
