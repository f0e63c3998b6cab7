"""Check that a language model of ``transformers`` predicts the next token from earlier ones alone.

An encoder such as BERT sees the tokens that it is trained to predict, and its loss falls to values
that no text has. The check is by value: two forwards of a row, with another last token in the
second. No list of families decides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.dropout import evaluated
from megatron_lightning.models.plans.hf_plans import transformers_models
from megatron_lightning.models.teacher_student import FrozenPair
from megatron_lightning.optional import require

_LENGTH = 8
"""Tokens of a row on each rank that shares the row. In a short row a token weighs much."""
_LARGEST, _LARGEST_OF_EXPERTS = 1e-5, 1e-2
"""Largest change of an earlier loss relative to the last one's. Experts round tokens differently
beside other tokens, and other layers do not. An encoder changes losses by about 1 / tokens."""


def check_decoder(model: Any) -> None:
    """Check that a model reads one text, not two.

    Raises:
        ConfigError: If the model has an encoder beside a decoder.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} has an encoder and a decoder ({model.config.model_type}), and "
            "HuggingFaceModule trains models that read and predict one row of tokens: the encoder "
            "would see the answers. Train it by MaskedLanguageModule with MaskedDataModule (T5), "
            "or in a LightningModule of your own."
        )


def check_causal(module: LightningModule) -> None:
    """Check that no token changes the losses of earlier tokens. A collective under
    ``MegatronStrategy``, in ``on_train_start``.

    Models in 8 or 4 bits are not checked: a token rounds its neighbors.

    Args:
        module: A module with ``model``, and the batch entries of tokens and labels first in
            ``sequence_dims``.

    Raises:
        ConfigError: If a token does.
    """
    strategy: Any = module.trainer.strategy
    models = list(transformers_models(module).values())
    is_quantized = hasattr(module.trainer.precision_plugin, "recipe")
    has_probe = hasattr(strategy, "probe")
    if not models or is_quantized or not (has_probe or module.trainer.world_size == 1):
        return
    context = getattr(strategy, "context", None)
    length = _LENGTH if context is None else _LENGTH * context.tp.size * context.cp.size
    rows = _rows(models[-1], length).to(module.device)
    names = list(module.sequence_dims)[:2]  # type: ignore[arg-type]

    def losses_of(batch: dict[str, Tensor]) -> Tensor:
        return _losses(module.model, batch[names[0]], batch[names[1]])  # type: ignore[arg-type]

    losses = []
    with evaluated(module.model):  # type: ignore[arg-type]
        for row in rows:
            batch = {names[0]: row[None], names[1]: rows[0][None].roll(-1, 1)}
            if has_probe:
                losses.append(strategy.probe(losses_of, batch).double())
            else:
                with torch.no_grad(), module.trainer.precision_plugin.val_step_context():
                    losses.append(losses_of(batch).double())
    change = (losses[1] - losses[0]).abs()[0].amax(-1)
    own, before = float(change[-1]), float(change[:-1].max())
    has_experts = any("expert" in name for model in models for name, _ in model.named_modules())
    if before > own * (_LARGEST_OF_EXPERTS if has_experts else _LARGEST):
        raise ConfigError(_message(models[-1], length, before, own))


def _message(model: Any, length: int, before: float, own: float) -> str:
    require("transformers", "a model of transformers")
    import transformers

    advice = (
        f"transformers {transformers.__version__} computes it without a causal mask although "
        "is_decoder is set: use a version that does, or another model"
        if getattr(model.config, "is_decoder", False)
        else 'Set "is_decoder": true in the config.json of the folder (families such as BERT), or '
        "train an encoder by MaskedLanguageModule"
    )
    return (
        f"{type(model).__name__} sees later tokens: another last token in a row of {length} "
        f"changes an earlier loss by {before:.2g} (the last one by {own:.2g}), so that training "
        f"would read the answers that it predicts. {advice}."
    )


def _rows(model: Any, length: int) -> Tensor:
    """Return two rows [2, s] of usual tokens, with different last tokens.

    Special tokens have the first or the last ids.
    """
    size = int(model.config.get_text_config().vocab_size)
    first, count = size // 4, max(2, size // 4)
    row = first + torch.arange(length) * 7 % count
    other = row.clone()
    other[-1] = first + (other[-1] - first + count // 2) % count
    return torch.stack([row, other])


def _losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the losses [b, s, m] of m models."""
    if isinstance(model, FrozenPair):
        return torch.stack(list(model(tokens, labels)), -1)
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")[..., None]
