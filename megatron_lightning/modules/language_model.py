"""Training of a language model: losses of tokens, optimizer, and a learning rate schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from megatron_lightning.assembly.state.left_out import check_full, left_out_digests
from megatron_lightning.compat import fused_adamw
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.moe import balance_experts
from megatron_lightning.layers.step_report import log_reports
from megatron_lightning.modules.frozen_parameters import FrozenParameters
from megatron_lightning.modules.schedule_lengths import (
    Lengths,
    ScheduleName,
    check_schedule_name,
)
from megatron_lightning.optim.lr_schedules import LRSchedule, ScheduledLR
from megatron_lightning.optim.maximal_update import (
    GroupScaling,
    MaximalUpdate,
    Scaling,
    scale_eps,
)
from megatron_lightning.optim.named_optimizer import NamedOptimizer, PlainValue, check_defaults
from megatron_lightning.optim.param_groups import (
    NO_DECAY,
    ParamGroup,
    check_options,
    make_param_groups,
)
from megatron_lightning.parallel.shards.stored_weight import StoredWeight
from megatron_lightning.peft import LoRA, VeRA
from megatron_lightning.peft.methods.method import AdapterMethod
from megatron_lightning.peft.methods.table import method_of, settings_of
from megatron_lightning.peft.record import PEFT, Record, read_records, write_record
from megatron_lightning.peft.resume import check_scales
from megatron_lightning.peft.sources import digest_of_base
from megatron_lightning.pipeline.batch.sequence_split import IGNORED_LABEL
from megatron_lightning.precision.served.qat import QAT, resume_qat, write_qat
from megatron_lightning.precision.served.values import ServedName

Batch = dict[str, Tensor]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class LanguageModule(LightningModule):
    """A language model trained with AdamW, or with another optimizer. Subclasses define the model.

    A batch holds ``tokens`` and ``labels`` [b, s] (already shifted, -100 leaves a token out), and
    may hold ``loss_mask`` [b, s], ``position_ids`` [b, s] and ``document_ids`` [b, s] (tokens
    attend only to tokens with the same number in the row). Batches of models with experts may hold
    ``padding`` [b, s] (tokens that no router counts, true for padding), and ``routes`` [b, s, m,
    k], the experts of each token in each layer of experts.

    The loss is the weighted mean over the counted tokens, with ``loss_mask`` as non-negative
    weights (0 leaves a token out). Only the ratios of the weights matter.

    Args:
        learning_rate: Peak learning rate.
        min_learning_rate: Learning rate after the decay.
        weight_decay: Decoupled weight decay of AdamW.
        betas: Adam's decay rates.
        eps: Adam's epsilon.
        warmup_steps: Optimizer steps of linear warm-up. The first step is taken at rate 0. Below 1:
            a fraction of ``decay_steps``, or of the fit without ``decay_steps``.
        decay_steps: Optimizer steps until the end of the decay. "max": all steps of the fit.
            Default: "max" with the name of a schedule, otherwise a constant rate after the warm-up.
        lr_schedule: Shape of the decay: "linear", "cosine" (the default with ``decay_steps``), or
            "wsd" (constant, with a tail of a tenth of ``decay_steps``). Or another schedule, in
            place of ``min_learning_rate``, ``warmup_steps`` and ``decay_steps``.
        param_groups: Parameters with a separate learning rate or weight decay. Default: norms and
            biases without weight decay.
        fused: Whether AdamW steps all parameters by a single kernel, if torch has the kernel for
            the device.
        optimizer: Another optimizer than AdamW: ``class_path`` and ``init_args``, which replace
            ``weight_decay``, ``betas``, ``eps`` and ``fused``. See :class:`NamedOptimizer`.
        freeze: Patterns of names of parameters and modules that are not trained.
        train_only: Patterns of names of parameters and modules. All others are not trained.
        peft: Adapters trained in the place of the model's weights. Default: train all weights.
        qat: Weights rounded in the forward as servers will hold them: a format such as "nvfp4", or
            :class:`~megatron_lightning.precision.QAT`. Default: not rounded.
        maximal_update: Learning rates and initial values scaled from a narrow base model (μP), see
            :class:`~megatron_lightning.optim.MaximalUpdate`. Default: not scaled.

    Raises:
        ConfigError: If the schedule contradicts itself.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = {
        "tokens": 1,
        "labels": 1,
        "loss_mask": 1,
        "position_ids": 1,
        "document_ids": 1,
        "position_rows": 2,
        "padding": 1,
        "routes": 1,
    }

    _has_own_options: ClassVar[bool] = True
    """Whether a user sets the options, and another module does not pass its own on."""

    def __init__(
        self,
        *,
        learning_rate: float = 3e-4,
        min_learning_rate: float = 0.0,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        warmup_steps: int | float = 0,
        decay_steps: int | Literal["max"] | None = None,
        lr_schedule: LRSchedule | ScheduleName | None = None,
        param_groups: Sequence[ParamGroup] | None = None,
        fused: bool = True,
        optimizer: dict[str, PlainValue] | str | None = None,
        freeze: Sequence[str] | None = None,
        train_only: Sequence[str] | None = None,
        peft: LoRA | VeRA | None = None,
        qat: QAT | ServedName | None = None,
        maximal_update: MaximalUpdate | None = None,
    ) -> None:
        super().__init__()
        if learning_rate < 0.0:
            raise ConfigError(
                f"learning_rate is {learning_rate}; must not be negative. Set it to 0 or more."
            )
        if not 0.0 <= min_learning_rate <= learning_rate:
            raise ConfigError(
                f"min_learning_rate={min_learning_rate} is not between 0 and "
                f"learning_rate={learning_rate}. Lower it."
            )
        if isinstance(lr_schedule, Mapping):
            lr_schedule = LRSchedule(**lr_schedule)
        if isinstance(peft, Mapping):  # from `load_from_checkpoint`, as the schedule
            peft = method_of(peft)
        if isinstance(maximal_update, Mapping):
            maximal_update = MaximalUpdate(**maximal_update)
        self.maximal_update = maximal_update
        """Factors of learning rates and initial values from a base model. None: none."""
        groups = [
            row if isinstance(row, ParamGroup) else ParamGroup(**row) for row in param_groups or ()
        ]
        named = None if optimizer is None else NamedOptimizer.of(optimizer)
        self._named_optimizer = named
        self.qat = QAT.of(qat)
        """Rounding of weights in the forward. None: not rounded."""
        if self.qat is not None and peft is not None:
            peft.check_rounded()
        self._frozen_parameters = FrozenParameters(freeze=freeze or (), train_only=train_only or ())
        if self._frozen_parameters and peft is not None:
            raise ConfigError(
                f"freeze={freeze} and train_only={train_only} are given beside peft, and adapters "
                "freeze all weights of the model already. Leave them out; modules_to_save of LoRA "
                "names weights that are trained, too."
            )
        self.is_partly_frozen = bool(self._frozen_parameters)
        """Whether frozen parameters are left out of the optimizer."""
        self._settings: dict[str, Any] = {
            "learning_rate": learning_rate,
            "min_learning_rate": min_learning_rate,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
            "warmup_steps": warmup_steps,
            "decay_steps": decay_steps,
            "lr_schedule": asdict(lr_schedule)
            if isinstance(lr_schedule, LRSchedule)
            else lr_schedule,
            "param_groups": None if param_groups is None else [asdict(group) for group in groups],
            "fused": fused,
            "optimizer": None if named is None else named.plain(),
            "freeze": None if freeze is None else list(freeze),
            "train_only": None if train_only is None else list(train_only),
            "peft": None if peft is None else settings_of(peft),
            "qat": None if self.qat is None else asdict(self.qat),
            "maximal_update": None if maximal_update is None else asdict(maximal_update),
        }
        if named is not None and self._has_own_options:
            check_defaults(type(self), named, self._settings)
        self._records: Sequence[Record] = ()
        self._left_out: Mapping[str, str | None] = {}
        self.peft: AdapterMethod | None = peft
        """Adapters. None: all weights are trained."""
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.eps = eps
        self.fused = fused
        self.param_groups = (NO_DECAY,) if param_groups is None else tuple(groups)
        schedule_name = lr_schedule if isinstance(lr_schedule, str) else None
        if schedule_name is not None:
            check_schedule_name(schedule_name)
            decay_steps = "max" if decay_steps is None else decay_steps
        self._lengths = Lengths(schedule_name, min_learning_rate, warmup_steps, decay_steps)
        given = lr_schedule if isinstance(lr_schedule, LRSchedule) else None
        self._lengths.check(given)
        self.lr_schedule = given or self._lengths.schedule()
        """Schedule of the learning rate. None: constant, or known at the start of the fit."""

    def _adapt(self, model: ModuleT) -> ModuleT:
        """Attach the adapters to a newly built model, freeze parameters, or round weights. Return
        the model.
        """
        if self.qat is not None:
            self.qat.apply(model)
        if self._frozen_parameters:
            self._frozen_parameters.apply(model)
        return model if self.peft is None else self.peft.apply(model)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin to round weights, or not yet."""
        QAT.follow(self, self.trainer.global_step)

    def on_validation_start(self) -> None:
        """Round weights as servers do."""
        QAT.follow(self, None)

    def on_test_start(self) -> None:
        """Do as :meth:`on_validation_start`."""
        QAT.follow(self, None)

    def on_predict_start(self) -> None:
        """Do as :meth:`on_validation_start`."""
        QAT.follow(self, None)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Describe the adapters, for tools reading checkpoints. Leave out frozen weights in few
        bits, because the base has the same weights.
        """
        write_record(self, checkpoint)
        if self._trainer is not None:
            write_qat(self, checkpoint)
        state = checkpoint.get("state_dict") or {}
        stored = [name for name, tensor in state.items() if isinstance(tensor, StoredWeight)]
        for path, entry in checkpoint.get(PEFT, {}).items() if stored else ():
            prefix = f"{path}." if path else ""
            entry["left_out"] = sorted(name for name in stored if name.startswith(prefix))
        for name in stored:
            del state[name]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record the adapters of the checkpoint, and the weights that it leaves to the base.

        Raises:
            ConfigError: If the checkpoint was trained with another rounding.
        """
        self._records = read_records(checkpoint)
        resume_qat(self, checkpoint)
        self._left_out = left_out_digests(checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict. The state dict of a checkpoint of adapters or trained weights alone
        leaves the others unchanged.

        Raises:
            CheckpointError: If the adapters belong to another base, or have other ranks or scales.
        """
        check_scales(self, self._records, state_dict)
        left_out = {n for record in self._records for n in (*record.left_out, *record.beside)}
        left_out |= self._left_out.keys()
        frozen_tensors = {
            n: t for n, t in self.state_dict().items() if n in left_out - state_dict.keys()
        }
        if frozen_tensors:
            check_full(self, self._left_out)
        for record in self._records if frozen_tensors and not self._left_out else ():
            model = self.get_submodule(record.path)
            prefix = f"{record.path}." if record.path else ""
            names = {name.removeprefix(prefix) for name in record.left_out}
            record.base.check(digest_of_base(model, names=names), type(model).__name__)
        return super().load_state_dict({**frozen_tensors, **state_dict}, *args, **kwargs)

    def num_items(self, batch: Batch) -> Tensor:
        """Return the sum of the tokens' weights. Without a floating ``loss_mask`` this is the
        number of counted tokens.
        """
        return token_weights(batch).sum()

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the optional inputs of ``forward`` in a batch."""
        names = ("position_ids", "document_ids", "routes")
        return {name: batch[name] for name in names if name in batch}

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the weighted mean of the tokens' losses, and the sum of the weights."""
        weights = token_weights(batch)
        # Layers with additional losses, such as multi-token prediction, see the mask.
        labels = batch["labels"].masked_fill(weights == 0, IGNORED_LABEL)
        losses, addition = self._token_losses(batch, labels)
        if "validation_set" in batch:
            self._log_sets(batch["validation_set"], losses * weights, weights)
        num_items = self.num_items(batch)
        loss = (losses * weights).sum() / torch.where(num_items > 0, num_items, 1)
        return loss if addition is None else loss + addition, num_items

    def _token_losses(self, batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the losses of the tokens [b, s], and a loss of the micro-batch beside them."""
        return self(batch["tokens"], labels, **self._inputs(batch)), None

    def _log_sets(self, sets: Tensor, losses: Tensor, weights: Tensor) -> None:
        """Log the mean loss of every validation set.

        Args:
            sets: Position of each row's set in the data module's ``validation_names`` [b].
            losses: Weighted losses of the tokens [b, s].
            weights: Weights of the tokens [b, s].
        """
        data = getattr(self.trainer, "datamodule", None)
        for number, name in enumerate(getattr(data, "validation_names", ())):
            rows = (sets == number)[:, None]
            num_items = (weights * rows).sum()
            loss = (losses * rows).sum() / torch.where(num_items > 0, num_items, 1)
            self.log(f"val_loss/{name}", loss, sync_dist=True, **_weighed_by(num_items))

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss of a micro-batch and the sum of the tokens' weights."""
        loss, num_items = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        log_reports(self, loss)
        return {"loss": loss, "num_items": num_items}

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log ``val_loss``, the mean over all tokens."""
        loss, num_items = self._loss(batch)
        weighed = _weighed_by(num_items)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, **weighed)
        log_reports(self, prefix="val_", sync_dist=True, **weighed)
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Log ``test_loss``, the mean over all tokens."""
        loss, num_items = self._loss(batch)
        weighed = _weighed_by(num_items)
        self.log("test_loss", loss, sync_dist=True, **weighed)
        log_reports(self, prefix="test_", sync_dist=True, **weighed)
        return loss

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return the most likely next token at every position, [b, s]."""
        logits: Tensor = self(batch["tokens"], **self._inputs(batch))
        return logits.argmax(dim=-1)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Step the optimizer, followed by the experts' biases."""
        with balance_experts(self, optimizer):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def check_optimizer(self) -> None:
        """Check a named optimizer against the full model.

        Raises:
            ConfigError: If the class is unknown, or patterns of a chain match nothing.
        """
        if self._named_optimizer is not None:
            for member in self._named_optimizer.each():
                member.check()
            self._named_optimizer.check_patterns(self)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, and the learning rate schedule if a schedule is configured."""
        optimizer = self._optimizer()
        schedule = self.lr_schedule or self._schedule_of_fit()
        if schedule is None:
            return optimizer
        scheduler = ScheduledLR(optimizer, schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _optimizer(self) -> torch.optim.Optimizer:
        named = self._named_optimizer
        rule = self.maximal_update
        scaling = None if rule is None else Scaling.of(self, rule)
        if named is None:
            groups = make_param_groups(
                self,
                self.param_groups,
                lr=self.learning_rate,
                weight_decay=self.weight_decay,
                scaling=None if scaling is None else GroupScaling(scaling, torch.optim.AdamW),
            )
            make = fused_adamw if self.fused else torch.optim.AdamW
            adamw = make(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps)
            check_options(self.param_groups, adamw)
            scale_eps(adamw)
            return adamw
        mesh = self.device_mesh
        is_whole = mesh is None or "pp" not in (mesh.mesh_dim_names or ()) or mesh["pp"].size() == 1
        if is_whole:  # a stage has some of the names; the strategy has checked all of them before
            named.check_patterns(self)
        return named.make(self, self.param_groups, self.learning_rate, scaling)

    def _schedule_of_fit(self) -> LRSchedule | None:
        """Return the schedule with lengths derived from the steps of the fit. None: a constant
        rate.
        """
        if not self._lengths.follow_the_fit:
            return None
        if self._trainer is None:  # a check of the module before the Trainer has it
            return None
        return self._lengths.of_fit(self.trainer.estimated_stepping_batches)


def token_weights(batch: Batch) -> Tensor:
    """Return the weight [b, s] of every token in the loss: 0 for ignored labels. The dtype is fp32
    for a floating ``loss_mask``.

    Raises:
        ConfigError: If the batch has no labels.
    """
    if "labels" not in batch:
        raise ConfigError(
            f"the batch has no labels, but {', '.join(batch)}. "
            + (
                "Pairs of PreferenceDataModule train a DPOModule: set it as the model, or set "
                "FinetuneDataModule as the data."
                if "chosen" in batch
                else "Set data whose batches have tokens and labels, such as FinetuneDataModule."
            )
        )
    is_counted = batch["labels"] != IGNORED_LABEL
    mask = batch.get("loss_mask")
    if mask is None:
        return is_counted
    mask = mask.float() if mask.is_floating_point() else mask
    return mask.masked_fill(~is_counted, 0)


def _weighed_by(num_items: Tensor) -> dict[str, Any]:
    """Return the option of ``self.log`` to weigh a batch in the mean over an evaluation.

    Lightning multiplies by ``batch_size`` and divides by the sum, so that a float is a weight.
    """
    return {"batch_size": float(num_items)}
