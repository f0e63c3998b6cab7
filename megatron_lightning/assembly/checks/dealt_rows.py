"""Models whose packed rows can be dealt to context-parallel ranks in more than two chunks each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.styles import DividedRows, GatheredTokens
from megatron_lightning.models import GPTModel
from megatron_lightning.models.plans.foreign_code import foreign_code
from megatron_lightning.parallel.shards.sharding import ShardingPlan


def why_two_chunks(module: nn.Module, plans: Mapping[str, ShardingPlan]) -> str | None:
    """Return why packed rows keep two chunks a rank. None: the models of ``plans`` (by path) take
    any number.
    """
    # A module without positions may take rows apart and join them, too.
    placing = {path: plan for path, plan in plans.items() if _places_tokens(plan)}
    reasons = (_why_two(module.get_submodule(path), plan) for path, plan in placing.items())
    return next(filter(None, reasons), None)


def check_chunks(why_two: str | None, chunks: Literal["auto"] | int) -> None:
    """Check that models take the chunks a rank that the user asks for.

    Raises:
        ConfigError: If they take two, because of ``why_two``.
    """
    if why_two and chunks not in ("auto", 2):
        raise ConfigError(
            f"chunks_per_rank is {chunks}, and packed rows cannot be dealt in more than two chunks "
            f'a rank: {why_two}. Set chunks_per_rank to "auto" or 2.'
        )


def _places_tokens(plan: ShardingPlan) -> bool:
    """Return whether what a plan describes depends on which tokens a rank holds."""
    shares = any(getattr(row, "shares_sequences", False) for row in plan.modules.values())
    return shares or plan.positions is not None


def _why_two(model: nn.Module, plan: ShardingPlan) -> str | None:
    name = type(model).__name__
    if not plan.takes_deals:
        return f"the sharding plan of {name} does not say takes_deals=True"
    # Code in models of transformers is looked for with their plans. A plan made with | of the plan
    # of a GPTModel says what that plan says, also for the code around the model.
    has_gpt = any(isinstance(module, GPTModel) for module in model.modules())
    if has_gpt and (code := foreign_code(model, _own_modules(model, plan))):
        return f"{name} has code of others ({code}), which may mix tokens of two"
    return None


def _own_modules(model: nn.Module, plan: ShardingPlan) -> set[str]:
    """Return the paths of a user's modules that get rows in order, whatever the deal."""
    own = GatheredTokens | DividedRows
    return {path for path, _ in model.named_modules() if isinstance(plan.style_of(path), own)}
