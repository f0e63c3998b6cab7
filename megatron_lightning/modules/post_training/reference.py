"""Training compared with a reference: a frozen model, other adapters, or scores in the data."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Literal, get_args

from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.adapters.adapter_layers import adapters_disabled
from megatron_lightning.layers.dropout import set_dropout
from megatron_lightning.models.teacher_student import ReferencePair
from megatron_lightning.modules.first_adapters import ENTRY, FirstAdapters
from megatron_lightning.modules.frozen_parameters import FrozenParameters
from megatron_lightning.modules.objective import ObjectiveModule, Template, template_of
from megatron_lightning.peft.methods.method import AdapterMethod

Reference = Literal["scores", "adapters", "base", "model"]


class ReferencedModule(ObjectiveModule):
    """A language model trained in comparison with a reference. Subclasses define the loss.

    Args:
        model: The trained model, with adapters, optimizer and schedule.
        reference: The reference. None: the loss has none.
        reference_model: The module of a second model, for the reference "model". None: as
            ``model``, before training.
        dropout: Whether the trained model has dropout. The reference never has.

    Raises:
        ConfigError: If values contradict each other.
    """

    def __init__(
        self,
        model: Template,
        reference: Reference | None,
        reference_model: Template | None,
        *,
        dropout: bool,
    ) -> None:
        template = template_of(model, "model")
        second = (
            None if reference_model is None else template_of(reference_model, "reference_model")
        )
        if second is not None and reference != "model":
            raise ConfigError(
                f"reference_model is set, and the reference is {reference!r}. Set reference to "
                '"model", or leave reference_model out.'
            )
        # Without a model of its own, the reference is the model before training.
        frozen = (second or _without_adapters(template)) if reference == "model" else None
        super().__init__(template, frozen)
        self.reference: Reference | None = reference
        """The reference. None: the loss has none."""
        self.dropout = dropout
        self._second = second
        self._first: FirstAdapters | None = None
        self._loaded: Mapping[str, Tensor] | None = None  # first values in a checkpoint

    def joined(self, models: Sequence[nn.Module]) -> nn.Module:
        """Return the trained model, with a frozen reference both in one module."""
        trained = models[0]
        if not self.dropout:
            set_dropout(trained, 0.0)
        return trained if len(models) == 1 else ReferencePair(models[1], trained)

    @property
    def uses_adapters(self) -> bool:
        """Whether the reference is the trained model with other adapters, or none."""
        return self.reference in ("adapters", "base")

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute with the adapters of the reference inside the block, without gradients."""
        if self._first is not None:
            return self._first.swapped_in()
        return adapters_disabled(self)

    def keep_first(self) -> None:
        """Keep the first values of the adapters, unless a checkpoint has brought them."""
        if self.reference == "adapters" and self._first is None:
            self._first = FirstAdapters(self, self.context, self._loaded)

    def on_train_start(self) -> None:
        """Check the model, and keep the first values of the adapters as the reference."""
        super().on_train_start()
        self.keep_first()

    def on_validation_start(self) -> None:
        """Keep the first values of the adapters as the reference."""
        super().on_validation_start()
        self.keep_first()

    def on_test_start(self) -> None:
        """Keep the first values of the adapters as the reference."""
        super().on_test_start()
        self.keep_first()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the first values of the adapters, for a resume."""
        super().on_save_checkpoint(checkpoint)
        if self._first is not None:
            checkpoint[ENTRY] = dict(self._first.values)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the first values of the adapters from a checkpoint of such a training. Other
        checkpoints have the adapters to begin with.
        """
        super().on_load_checkpoint(checkpoint)
        self._loaded = checkpoint.get(ENTRY)
        self._first = None  # of the values before, such as a validation's


def chosen_reference(
    reference: Reference | None, default: Reference, peft: AdapterMethod | None
) -> Reference:
    """Return the reference of a loss that has one.

    Args:
        reference: The user's choice.
        default: The reference without a choice.
        peft: The trained model's adapters.

    Raises:
        ConfigError: If the name is unknown, or the reference does not exist.
    """
    if reference is not None and reference not in get_args(Reference):
        raise ConfigError(
            f"reference is {reference!r}; must be one of {', '.join(get_args(Reference))}."
        )
    reference = reference or default
    if reference in ("adapters", "base") and peft is None:
        raise ConfigError(
            f'reference is "{reference}", and the model has no adapters, so that it would be '
            'the trained model itself. Set peft of the model, or reference to "scores" or "model".'
        )
    if reference in ("adapters", "base") and peft is not None and peft.modules_to_save:
        raise ConfigError(
            f'reference is "{reference}", and modules_to_save '
            f"({', '.join(peft.modules_to_save)}) are trained in place, so that the model without "
            'adapters changes as well. Set reference to "scores" or "model".'
        )
    return reference


def default_reference(
    peft: AdapterMethod | Mapping[str, Any] | None, other: Reference
) -> Reference:
    """Return the reference of a model with or without adapters, by their options.

    Switching adapters off costs no memory, but needs a base that stays as it is. ``other`` is
    always right.
    """
    options = asdict(peft) if isinstance(peft, AdapterMethod) else peft
    return other if options is None or options["modules_to_save"] else "adapters"


def _without_adapters(template: Template) -> Template:
    """Return a template of the same model before training."""
    copied = copy.copy(template)
    copied.peft = None
    copied._frozen_parameters = FrozenParameters()  # all of it is frozen
    return copied
