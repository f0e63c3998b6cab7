"""Options of ``PolicyModule``, with the names and defaults of TRL."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from megatron_lightning.config.value_checks import check_counts
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.advantages import AdvantageName, Scale, check_advantage
from megatron_lightning.layers.losses.policy_loss import PolicyLoss
from megatron_lightning.modules.objective import Template
from megatron_lightning.modules.post_training.reference import Reference


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(PolicyLoss):
    """Options of a policy: its loss, and what the loss is computed from.

    Args:
        model: A :class:`HuggingFaceModule` or a :class:`GPTLightningModule`: the model, adapters,
            optimizer and schedule.
        max_completion_length: Most tokens of an answer, and the divisor of dr_grpo.
        temperature: Divisor of the logits, in sampling and in all forwards of training.
        advantage: ``grpo``, ``rloo`` or ``reinforce_pp``. See ``layers.losses.advantages``.
        scale_rewards: Whose deviation divides the advantages of grpo: ``group``, ``batch`` or
            ``none``. True: group. False: none.
        mask_truncated_completions: Whether answers without an end token are not trained. They count
            in the weight of losses by rows, and their tokens in no weight, as in TRL.
        top_entropy_quantile: Part of the tokens, those of the highest entropy, that are trained.
            The others count in the weight alone.
        num_iterations: Times that the rows of a generation are trained.
        updates_per_generation: Optimizer steps that share the rows of a generation.
        reference: The model that the divergence compares with, for ``beta``. ``adapters``: the same
            model with the adapters that the training began with, or without adapters if these began
            at zero. ``base``: the same model without adapters. ``model``: a second, frozen model.
            ``scores``: an entry ``ref_logprobs`` [b, s] of the batches. Default: ``adapters`` if
            the model has adapters, otherwise ``model``.
        reference_model: The module of the second model. Default: as ``model``, before training.
        dropout: Whether the trained model has dropout. Old and reference scores never have.

    Raises:
        ConfigError: If a value, or the combination, cannot work.
    """

    model: Template = field(kw_only=False)
    temperature: float = 1.0
    advantage: AdvantageName = "grpo"
    scale_rewards: Scale | bool = "group"
    mask_truncated_completions: bool = False
    top_entropy_quantile: float = 1.0
    num_iterations: int = 1
    updates_per_generation: int = 1
    reference: Reference | None = None
    reference_model: Template | None = None
    dropout: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_advantage(self.advantage, self.scale_rewards)
        check_counts(self, "num_iterations", "updates_per_generation")
        if not 0.0 < self.top_entropy_quantile <= 1.0:
            raise ConfigError(
                f"top_entropy_quantile is {self.top_entropy_quantile}; set it to a part of the "
                "tokens, above 0 and at most 1."
            )
        if not self.beta and (self.reference is not None or self.reference_model is not None):
            raise ConfigError(
                "a reference is set, and beta is 0, so that nothing is compared with it. Set beta "
                "to a positive number, such as 0.04, or leave the reference out."
            )

    def plain(self) -> dict[str, Any]:
        """Return the options without models."""
        names = (one.name for one in fields(self))
        models = ("model", "reference_model")
        return {name: getattr(self, name) for name in names if name not in models}
