"""A frozen and a trained model in one module, divided together by a pipeline.

A pipeline divides a single module. So the two models are one module with the units of both: first
the frozen model's, then the trained model's. With two virtual stages every pipeline rank has a
stage of each, and nothing is held or computed twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.losses.divergence import (
    Direction,
    TopLogits,
    divergence,
    jensen_shannon,
    top_divergence,
    top_logits,
)
from megatron_lightning.layers.losses.loss import Vocabulary, losses_of
from megatron_lightning.models.token_outputs import (
    temperature_of,
    token_logits,
    token_losses_of,
    vocabulary_size,
)
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.parallel.shards.vocabulary_ranges import align_vocabulary
from megatron_lightning.pipeline.schedules.partition import (
    STAGE_END,
    Unit,
    unit_names,
    unit_weights,
)
from megatron_lightning.pipeline.stages.units import find_pipelined

DivergenceKind = Literal["forward", "reverse", "top_k", "jsd"]
_KEPT = "frozen_output"


class FrozenPair(nn.Module):
    """Both models in one forward. The frozen model runs first, in eval mode and without gradients.

    Args:
        frozen: Gets no gradients, and no optimizer has the parameters. Modules are frozen in place.
        trained: Called with the same inputs.
    """

    is_partly_frozen = True
    """Optimizers leave out frozen parameters."""

    def __init__(self, frozen: nn.Module, trained: nn.Module) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False).eval()
        self.trained = trained

    def train(self, mode: bool = True) -> FrozenPair:
        """Set the mode of the trained model. The frozen model stays in eval mode."""
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the outputs of the frozen and of the trained model."""
        with torch.no_grad():
            first = self.frozen(*inputs, **options)
        return first, self.trained(*inputs, **options)

    def pipeline_units(self) -> list[Unit]:
        """Return the units of both models. Both models weigh the same in total, so that two virtual
        stages hold a model each on every rank.

        If the models state the ends of their stages, no stage has units of both.

        Raises:
            ConfigError: If a model has no units, or the models state different numbers of stages.
        """
        units: list[Unit] = []
        ends: list[int] = []
        for name in ("frozen", "trained"):
            path, _, own_units = find_pipelined(self.get_submodule(name))
            ends.append(own_units.count(STAGE_END))
            if units and ends[0]:
                units.append(STAGE_END)
            # Normalized, as both models should fill one virtual stage on each rank, whatever their
            # sizes.
            weights = iter(unit_weights(own_units))
            total = sum(unit_weights(own_units))
            prefix = f"{name}.{path}." if path else f"{name}."
            for unit in own_units:
                if unit == STAGE_END:
                    units.append(STAGE_END)
                else:
                    units += [(f"{prefix}{n}", next(weights) / total) for n in unit_names([unit])]
            if name == "frozen" and hasattr(self, _KEPT):
                units.append((_KEPT, 0.0))
        if ends[0] != ends[1]:
            raise ConfigError(
                f"the frozen model states {ends[0] + 1} stages and the trained model "
                f"{ends[1] + 1} ({STAGE_END} in layer_pattern), and a pipeline divides both alike. "
                "Write equally many | in both patterns, or none."
            )
        return units


class _Losses(nn.Module):
    """Token losses, as a unit of a pipeline."""

    def forward(
        self, output: Tensor, labels: Tensor | None = None, vocabulary: Vocabulary | None = None
    ) -> Tensor:
        """Map logits to losses [b, s]. Without a vocabulary the output is losses."""
        if labels is None or vocabulary is None:
            return output
        return losses_of(output, labels, vocabulary)


class ReferencePair(FrozenPair):
    """A reference and a policy: forward returns the token losses of both.

    Args:
        frozen: A language model.
        trained: A language model with the same vocabulary.
    """

    def __init__(self, frozen: nn.Module, trained: nn.Module) -> None:
        super().__init__(frozen, trained)
        self.frozen_output = _Losses()

    def forward(
        self, tokens: Tensor, labels: Tensor, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the token losses of the reference and of the policy, [b, s] each.

        Args:
            tokens: [b, s].
            labels: [b, s], already shifted. -100 has no loss.
            padding: [b, s] whether a token is padding. None: no token is.
        """
        with torch.no_grad():
            if isinstance(self.frozen, GPTModel):
                reference = self.frozen_output(self.frozen(tokens, labels, padding=padding))
            else:
                logits, vocabulary = token_logits(self.frozen, tokens)
                vocabulary = replace(vocabulary, temperature=temperature_of(self.frozen))
                reference = self.frozen_output(logits, labels, vocabulary)
        return reference, token_losses_of(self.trained, tokens, labels, padding=padding)


class _Teacher(nn.Module):
    """The teacher's logits, or the largest, as a unit of a pipeline.

    Args:
        common: Entries of the vocabulary that both models have.
        k: Number of the largest logits. 0: all.
    """

    def __init__(self, common: int, k: int) -> None:
        super().__init__()
        self.common = common
        self.k = k

    def forward(self, logits: Tensor, vocabulary: Vocabulary) -> Any:
        """Map this rank's logits [b, s, v / ranks] to the logits or to :class:`TopLogits`."""
        if not self.k:
            return logits
        start = vocabulary.start
        own_logits = max(0, min(logits.shape[-1], self.common - start))
        if own_logits < logits.shape[-1]:  # entries without a token
            logits = logits.clone()
            logits[..., own_logits:] = float("-inf")
        return tuple(top_logits(logits, vocabulary, self.k))


class DistillationPair(FrozenPair):
    """A teacher and a student: forward returns the divergence of every token.

    Entries of the vocabulary that only one model has are rows that pad an embedding, and do not
    count.

    Args:
        frozen: The teacher, a language model.
        trained: The student, a language model with an equal tokenizer.
        kind: See ``layers.divergence``.
        temperature: Divisor of the logits.
        k: Number of the teacher's largest logits, for "top_k".
        beta: Weight of the teacher, for "jsd".

    Raises:
        ConfigError: If the models' numbers of logits are not known, or there are fewer than k.
    """

    def __init__(
        self,
        frozen: nn.Module,
        trained: nn.Module,
        *,
        kind: DivergenceKind = "forward",
        temperature: float = 1.0,
        k: int = 64,
        beta: float = 0.5,
    ) -> None:
        super().__init__(frozen, trained)
        self.kind = kind
        self.beta = beta
        self.temperature = temperature
        sizes = [vocabulary_size(model) for model in (frozen, trained)]
        if not all(sizes):
            unknown = type(trained if sizes[0] else frozen).__name__
            raise ConfigError(
                f"{unknown} has no output layer that get_output_embeddings() names, so that its "
                "vocabulary is not known. Use a causal language model."
            )
        self.sizes = sizes
        """Logits of a token, of the teacher and of the student."""
        if kind == "top_k" and not 0 < k <= min(sizes):
            raise ConfigError(
                f"k is {k}, and the vocabulary has {min(sizes)} entries. Set it to 1 or more, at "
                "most that."
            )
        self.frozen_output = _Teacher(min(sizes), k if kind == "top_k" else 0)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the divergences [b, s] and, with labels, the student's losses [b, s], in fp32.

        Args:
            tokens: [b, s].
            labels: [b, s], already shifted. -100 has no loss.
            inputs: Further inputs of both models, such as ``position_ids``.
        """
        # The teacher runs first, on the stages in front, and keeps no activations.
        with torch.no_grad():
            logits, vocabulary = token_logits(self.frozen, tokens, **inputs)
            teacher = self.frozen_output(logits, vocabulary)
        student, vocabulary = token_logits(self.trained, tokens, **inputs)
        losses = None if labels is None else losses_of(student, labels, vocabulary)
        common = min(self.sizes)
        own_logits = student[..., : max(0, common - vocabulary.start)]
        if self.frozen_output.k:
            out = top_divergence(
                own_logits, TopLogits(*teacher), vocabulary, temperature=self.temperature
            )
        else:
            theirs = align_vocabulary(
                teacher, self.sizes[0], vocabulary.group, vocabulary.size, common
            )
            out = self._divergence(own_logits, theirs, vocabulary)
        return out, losses

    def _divergence(self, student: Tensor, teacher: Tensor, vocabulary: Vocabulary) -> Tensor:
        temperature = self.temperature
        if self.kind == "jsd":
            beta = self.beta
            return jensen_shannon(student, teacher, vocabulary, beta=beta, temperature=temperature)
        direction: Direction = "reverse" if self.kind == "reverse" else "forward"
        return divergence(
            student, teacher, vocabulary, direction=direction, temperature=temperature
        )
