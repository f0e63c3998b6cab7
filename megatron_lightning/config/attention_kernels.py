"""Kernels of attention: a row for each, with the forms of attention that it supports and the scores
that it stores. No torch here.

The rows are in order of preference: ``auto`` is the first row that supports a form. Layers, the
line at the start of a run, refusals before any process exists, and the planner's memory read the
rows. ``layers/attention/attention_backend.py`` and ``layers/context/kernel_choice.py`` compute
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lightning.config.transformer import TransformerConfig

AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "math", "chunked", "flex"]
PIECE = 256
"""Most queries with stored scores at a time, in blocks."""
CHUNK = 64
"""Queries and keys of a chunk of the reference kernel."""
_HALF = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class KernelForm:
    """Attention to compute, as far as kernels differ in it."""

    device: str | None = None
    """Type of the device. None: unknown. Kernels for the form may exist on some device."""
    dtype: str | None = None
    """Dtype of queries and keys, by torch's name. None: unknown."""
    trained: bool = True
    """Whether gradients are computed."""
    dropout: float = 0.0
    """Probability of dropping a weight."""
    window: int | None = None
    """Number of earlier positions visible to a query. None: all."""
    softcap: float | None = None
    """Cap of the scores. None: no cap."""
    has_sinks: bool = False
    """Whether heads have a score of a key without a value."""
    has_documents: bool = False
    """Whether documents share a row."""
    num_context_ranks: int = 1
    """Ranks that share a sequence."""
    is_block: bool = False
    """Whether this is a block of queries and keys, with a log-sum-exp to merge blocks by."""
    is_cut: bool = False
    """Whether the edge of a window, or of a document, cuts the block."""

    @property
    def in_blocks(self) -> bool:
        """Whether blocks compute the attention: torch's function has no such form."""
        return self.is_block or bool(self._beyond_torch)

    @property
    def is_ragged(self) -> bool:
        """Whether a kernel for documents of different lengths has the form."""
        is_alone = self.num_context_ranks == 1 and not self.is_block
        return self.has_documents and is_alone and self.softcap is None and not self.has_sinks

    @property
    def _beyond_torch(self) -> list[str]:
        """Features that torch's function lacks, by the options' names."""
        present = {
            f"window_size=({self.window}, 0)": self.window is not None,
            f"attn_logit_softcapping={self.softcap}": self.softcap is not None,
            "softmax_type=learnable": self.has_sinks,
            "documents that share a row": self.has_documents,
            f"context_parallel_size={self.num_context_ranks}": self.num_context_ranks > 1,
        }
        return [name for name, is_present in present.items() if is_present]

    def __str__(self) -> str:
        general = "windows, documents that share a row, sinks, or ranks that share a sequence"
        return " and ".join(self._beyond_torch) or general


@dataclass(frozen=True)
class StoredScores:
    """Scores in memory while a kernel runs."""

    queries: int | None = None
    """Most queries at a time. None: all."""
    keys: int | None = None
    """Most keys at a time. None: all visible keys."""
    kept: bool = False
    """Whether the weights of all queries are kept for backward."""


@dataclass(frozen=True)
class AttentionKernel:
    """Row of the table."""

    limits: tuple[Callable[[KernelForm], str | None], ...] = ()
    """Each returns why a form is not supported. None: the form is within the limit."""
    scores: Callable[[KernelForm], StoredScores | None] = lambda _: None
    """Returns the stored scores. None: the kernel is fused, and stores no scores."""
    by_torch: bool = True
    """Whether torch's ``scaled_dot_product_attention`` runs the kernel for full sequences."""

    def supports(self, form: KernelForm) -> str | None:
        """Return why the kernel cannot compute a form, for a sentence that begins with the kernel.
        None: the kernel can.
        """
        reasons = (limit(form) for limit in (_no_dropout_in_blocks, *self.limits))
        return next((reason for reason in reasons if reason is not None), None)


def _no_dropout_in_blocks(form: KernelForm) -> str | None:
    if not (form.dropout and form.in_blocks):
        return None
    return f"drops no weights with {form}, and attention_dropout is {form.dropout}"


def _no_dropout_on_cpus(form: KernelForm) -> str | None:
    if not form.dropout or form.device != "cpu":
        return None
    return f"drops no weights on a CPU, and attention_dropout is {form.dropout}"


def _no_dropout(form: KernelForm) -> str | None:
    return f"drops no weights, and attention_dropout is {form.dropout}" if form.dropout else None


def _no_cpus(form: KernelForm) -> str | None:
    return "is a kernel of GPUs, and this is a CPU" if form.device == "cpu" else None


def _half_on_gpus(form: KernelForm) -> str | None:
    if form.device != "cuda" or form.dtype is None or form.dtype in _HALF:
        return None
    return (
        f"takes bf16 and fp16 only on GPUs, and attention is computed in {form.dtype}. Half "
        "precision is precision=bf16-mixed or bf16-true with attention_softmax_in_fp32=False"
    )


def _no_blocks(form: KernelForm) -> str | None:
    if not form.in_blocks:
        return None
    return f"has no form for blocks, in which attention is computed with {form}"


def _no_masks_on_gpus(form: KernelForm) -> str | None:
    is_masked = form.is_cut or form.window is not None
    if form.device != "cuda" or not is_masked or form.is_ragged:
        return None
    return f"takes no mask, as {form} needs at an edge"


def _no_caps(form: KernelForm) -> str | None:
    if form.softcap is None:
        return None
    return f"has no soft caps of scores, and attn_logit_softcapping is {form.softcap}"


def _no_sinks(form: KernelForm) -> str | None:
    return "has no sinks, and softmax_type is learnable" if form.has_sinks else None


def _no_context_ranks(form: KernelForm) -> str | None:
    if form.num_context_ranks == 1 and not form.is_block:
        return None
    return "needs full sequences, and ranks or blocks share them"


def _no_backward_on_cpus(form: KernelForm) -> str | None:
    return "has no backward on a CPU" if form.trained and form.device == "cpu" else None


KERNELS: Mapping[AttentionBackend, AttentionKernel] = {
    "flash": AttentionKernel((_no_dropout_on_cpus, _half_on_gpus, _no_masks_on_gpus, _no_caps)),
    "cudnn": AttentionKernel((_no_cpus, _half_on_gpus, _no_blocks, _no_caps)),
    "efficient": AttentionKernel((_no_cpus, _no_caps)),
    "math": AttentionKernel(
        scores=lambda form: StoredScores(PIECE) if form.in_blocks else StoredScores(kept=True)
    ),
    # Plain products in chunks, as the papers define them: what other kernels are compared with.
    "chunked": AttentionKernel(
        (_no_dropout,), scores=lambda _: StoredScores(CHUNK, CHUNK), by_torch=False
    ),
    # torch's FlexAttention. Without a compiler, as on a CPU here, all scores are stored.
    "flex": AttentionKernel(
        (_no_backward_on_cpus, _no_dropout, _no_sinks, _no_context_ranks),
        scores=lambda form: StoredScores() if form.device == "cpu" else None,
        by_torch=False,
    ),
}
"""Kernels by name, in order of preference."""


def choose_kernel(backend: AttentionBackend, form: KernelForm) -> AttentionBackend:
    """Return the first kernel that supports a form, or the named kernel.

    Raises:
        ConfigError: If the named kernel, or every kernel, cannot compute the form. Names the
            kernels that can.
    """
    names = tuple(KERNELS) if backend == "auto" else (backend,)
    for name in names:
        if KERNELS[name].supports(form) is None:
            return name
    works = [name for name, kernel in KERNELS.items() if kernel.supports(form) is None]
    if not works:
        raise ConfigError(
            f"attention_dropout={form.dropout} cannot be combined with {form}. Set it to 0."
        )
    raise ConfigError(
        f"attention_backend={backend} {KERNELS[backend].supports(form)}. Set it to "
        f"{' or '.join(('auto', *works))}."
    )


def kernel_form(
    config: TransformerConfig,
    num_context_ranks: int,
    *,
    device: str | None = None,
    dtype: str | None = None,
    trained: bool = True,
) -> KernelForm:
    """Return the attention of a model's layers, over rows of one document.

    Args:
        config: The model.
        num_context_ranks: Ranks that share a sequence.
        device: Type of the device.
        dtype: Dtype of the activations, by torch's name. None: unknown.
        trained: Whether gradients are computed, and weights dropped.
    """
    return KernelForm(
        device=device,
        dtype="float32" if config.attention_softmax_in_fp32 else dtype,
        trained=trained,
        dropout=config.attention_dropout if trained else 0.0,
        window=None if config.window_size is None else config.window_size[0],
        softcap=config.attn_logit_softcapping,
        has_sinks=config.num_sinks > 0,
        num_context_ranks=num_context_ranks,
    )


def check_scores(config: TransformerConfig) -> None:
    """Check that kernels named by the user, and dropout, can be combined with windows, caps and
    sinks of scores.

    Raises:
        ConfigError: Naming the values and the fix.
    """
    choose_kernel(config.attention_backend, kernel_form(config, num_context_ranks=1))
