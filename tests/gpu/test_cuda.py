"""Tests that need a GPU; skipped where there is none."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron_lightning.config import RecomputeOptions, TransformerConfig
from megatron_lightning.config.attention_kernels import KERNELS
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers import (
    CoreAttention,
    Documents,
    SequenceInfo,
    vocab_parallel_cross_entropy,
)
from megatron_lightning.layers.linear.gemm import Gemm
from megatron_lightning.layers.losses.linear_loss import Head, linear_losses
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.layers.state.recompute import apply_recompute
from megatron_lightning.models import GPTModel
from megatron_lightning.modules import GPTLightningModule
from megatron_lightning.optim import DistributedOptimizer, GradientReducer
from megatron_lightning.parallel import ParallelContext, ParallelLayout, ShardSpec
from megatron_lightning.parallel.random.rng import RngStreams
from megatron_lightning.step.loaders.transfer import BatchCopies
from megatron_lightning.strategies.megatron import MegatronStrategy
from tests.helpers.attention_forms import complaint, forms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = "cuda:0"
NUM_STEPS = 5


def _config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        vocab_size=96,
        max_sequence_length=32,
    )


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def _losses(
    accelerator: str, precision: str = "32-true", *, num_microbatches: int = 1
) -> list[float]:
    """Train from weights drawn on the CPU, whose generator differs from a GPU's."""
    module = GPTLightningModule(_config(), learning_rate=1e-3)
    module.configure_model()
    tokens = torch.randint(0, 96, (8 * NUM_STEPS, 33), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    recorder = _Losses()
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        strategy=MegatronStrategy(micro_batch_size=8 // num_microbatches),
        gradient_clip_val=1.0,
        max_epochs=1,
        callbacks=[recorder],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=8))
    assert len(recorder.losses) == NUM_STEPS
    return recorder.losses


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_training_steps_equal_the_cpus(num_microbatches: int) -> None:
    # fp32 without TF32 (torch's default); kernels add up in another order, and five Adam steps
    # amplify it
    assert _losses("gpu", num_microbatches=num_microbatches) == pytest.approx(
        _losses("cpu"), rel=1e-4
    )


def test_bf16_mixed_follows_fp32() -> None:
    # bf16 has 8 bits of mantissa: 4e-3 a rounding, averaged over 256 tokens
    assert _losses("gpu", "bf16-mixed") == pytest.approx(_losses("cpu"), rel=1e-2)


def test_bf16_parameters_with_fp32_masters_follow_fp32() -> None:
    # as above; the weights are rounded as well
    assert _losses("gpu", "bf16-true", num_microbatches=2) == pytest.approx(
        _losses("cpu"), rel=2e-2
    )


def test_compiled_kernels_of_the_loss_equal_the_uncompiled() -> None:
    """fp32: 1e-5, sums in another order. bf16: one rounding of the gradient, as uncompiled."""
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = torch.randn(96, 64, device=CUDA, dtype=dtype, requires_grad=True)
        weight = torch.randn(1000, 64, device=CUDA, dtype=dtype, requires_grad=True)
        targets, found = torch.randint(1000, (96,), device=CUDA), []
        for compiles in (False, True):
            vocabulary = CrossEntropy().vocabulary(1000)
            head = Head(Gemm(), vocabulary, None, False, chunk_tokens=40, compiles=compiles)
            losses = linear_losses(x, weight, None, targets, head)
            found.append((losses, *torch.autograd.grad(losses.sum(), (x, weight))))
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= limit * one.norm()


@pytest.fixture
def nccl(tmp_path: Any) -> Any:
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_one_nccl_rank_has_a_context_and_its_collectives_run() -> None:
    context = ParallelContext(ParallelLayout(), device=CUDA)
    group = context.axis("world").process_group
    assert group is not None
    value = torch.full((4,), 3.0, device=CUDA)
    dist.all_reduce(value, group=group)
    gathered = torch.empty(4, device=CUDA)
    dist.all_gather([gathered], value, group=group)
    dist.barrier(device_ids=[0])
    assert gathered.tolist() == [3.0] * 4
    on_cpu = torch.ones(1)
    dist.all_reduce(on_cpu, group=group)
    assert on_cpu.item() == 1.0


def test_rng_streams_leave_the_default_generator_alone() -> None:
    streams = RngStreams(7, device=torch.device(CUDA))
    torch.manual_seed(0)
    undisturbed = [torch.rand(3, device=CUDA) for _ in range(2)]
    torch.manual_seed(0)
    first = torch.rand(3, device=CUDA)
    with streams.fork("model-parallel-rng"):
        inside = torch.rand(3, device=CUDA)
    second = torch.rand(3, device=CUDA)
    assert torch.equal(torch.stack([first, second]), torch.stack(undisturbed))
    saved = streams.state_dict()
    with streams.fork("model-parallel-rng"):
        continued = torch.rand(3, device=CUDA)
    streams.load_state_dict(saved)
    with streams.fork("model-parallel-rng"):
        assert torch.equal(continued, torch.rand(3, device=CUDA))
    assert not torch.equal(inside, continued)


def _reduced(device: str) -> tuple[Tensor, Tensor]:
    """Accumulate two bf16 gradients that bf16 cannot add, and step once."""
    weight = nn.Parameter(torch.arange(6, dtype=torch.bfloat16, device=device).view(2, 3))
    specs = {"weight": ShardSpec.replicated((2, 3))}
    reducer = GradientReducer(
        {"weight": weight}, specs, ParallelContext(ParallelLayout(), device=device), sharded=False
    )
    optimizer = torch.optim.SGD([weight], lr=0.5)
    DistributedOptimizer(optimizer, reducer)
    reducer.begin_step()
    for factor in (256.0, 1.0):  # 257 needs 9 bits
        reducer.sync = factor == 1.0
        (weight * factor).sum().backward()
    reducer.finish()
    gradient = reducer.gradients()["weight"].clone()
    optimizer.step()
    return gradient.cpu(), weight.detach().cpu()


def test_the_reducer_adds_up_in_fp32_and_masters_are_stepped() -> None:
    gradient, weight = _reduced(CUDA)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((2, 3), 257.0))
    assert torch.equal(weight, _reduced("cpu")[1])


def test_cross_entropy_of_one_rank_equals_torchs() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 4, 96, device=CUDA, requires_grad=True)
    plain = copy.deepcopy(logits.detach()).requires_grad_()
    targets = torch.randint(0, 96, (5, 4), device=CUDA)
    group = ParallelContext(ParallelLayout(), device=CUDA).tp
    losses = vocab_parallel_cross_entropy(logits, targets, group)
    expected = nn.functional.cross_entropy(
        plain.flatten(0, 1), targets.flatten(), reduction="none"
    ).view(5, 4)
    losses.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(logits.grad, plain.grad)


@pytest.mark.parametrize(
    "options",
    [
        RecomputeOptions(offload_modules=["**.layers.*"], offload_min_bytes=0),
        RecomputeOptions(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
        RecomputeOptions(
            recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "layernorm"]
        ),
        RecomputeOptions(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            offload_modules=["**.layers.*"],
            offload_min_bytes=0,
        ),
    ],
    ids=["offload", "full", "selective", "both"],
)
def test_less_memory_and_the_same_step(options: RecomputeOptions) -> None:
    sizes = {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_sequence_length": 256,
    }
    with torch.device(CUDA):
        model = GPTModel(TransformerConfig(**sizes, hidden_dropout=0.1, attention_dropout=0.1))
        tokens = torch.arange(8 * 256).view(8, 256) % 96
    (loss, gradients, plain), *others = [
        _step_and_memory(model, tokens, apply) for apply in (None, options)
    ]
    again, same, less = others[0]
    assert torch.equal(loss, again)
    # Gradients of embeddings are summed in no fixed order.
    torch.testing.assert_close(same, gradients)
    assert less < 0.8 * plain


def _step_and_memory(
    model: GPTModel, tokens: Tensor, options: RecomputeOptions | None
) -> tuple[Tensor, list[Tensor], int]:
    """Return loss, gradients, and the bytes that the forward pass has kept."""
    if options is not None:
        apply_recompute(model, options)
    torch.manual_seed(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loss = model(tokens, labels=tokens).mean()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters()))), kept


class _NeverWaits(GPTLightningModule):
    """Lets torch refuse what waits for the device, from the second training step's start to the end
    of the optimizer's.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            torch.cuda.set_sync_debug_mode("error")
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_the_host_never_waits_in_a_step(precision: Any, micro_batch_size: int | None) -> None:
    tokens = torch.randint(0, 96, (32, 33))
    rows: Any = [{"tokens": row[:-1], "labels": row[1:]} for row in tokens]
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        precision=precision,
        strategy=MegatronStrategy(micro_batch_size=micro_batch_size),
        gradient_clip_val=1.0,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    try:
        trainer.fit(
            _NeverWaits(_config(), warmup_steps=2, decay_steps=8),
            DataLoader(rows, batch_size=8, pin_memory=True),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_out_of_memory_error_says_what_to_set() -> None:
    class Greedy(GPTLightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.empty(2**50, device=self.device)

    rows: Any = [{"tokens": torch.zeros(32, dtype=torch.int64)}] * 2
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=MegatronStrategy(), max_steps=1, logger=False
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Greedy(_config()), DataLoader(rows, batch_size=1))
    assert "Set a smaller micro_batch_size" in "".join(getattr(caught.value, "__notes__", ()))


class _NoHooks(pl.LightningModule):
    trainer: Any = None


def test_batches_are_copied_while_the_gpu_computes() -> None:
    copies = BatchCopies(torch.device(CUDA))
    assert copies.stream is not None
    batch, done = {"tokens": torch.arange(1 << 20).pin_memory()}, torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    done.record()
    found = copies.copy(batch, _NoHooks())
    copies.stream.synchronize()
    assert not done.query(), "the copy waited for the computation"
    assert torch.equal(found["tokens"].cpu(), batch["tokens"])


def test_memory_of_a_batch_is_not_reused_before_it_is_read() -> None:
    copies, sums = BatchCopies(torch.device(CUDA)), []
    for step in range(50):
        batch = copies.copy([torch.full((1 << 20,), step).pin_memory()], _NoHooks())
        torch.cuda._sleep(5_000_000)  # the next batch arrives before this one is read
        sums.append(batch[0].sum())
    assert [int(total) >> 20 for total in sums] == list(range(50))


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient", "math"])
def test_kernels_of_attention_agree_with_fp32_on_the_cpu(backend: Any) -> None:
    """bf16: 2e-2 of the norm; a GPU without the kernel refuses it in words."""
    q, k, v = (torch.randn(64, 2, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    expected = CoreAttention(0.0)(q, k, v)
    expected.sum().backward()
    copies = [x.detach().to(CUDA, torch.bfloat16).requires_grad_() for x in (q, k, v)]
    try:
        found = CoreAttention(0.0, backend=backend)(*copies)
    except ConfigError as error:
        pytest.skip(str(error))
    found.sum().backward()
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(copies, (q, k, v), strict=True))]
    for got, full in pairs:
        assert (got.cpu().float() - full).norm() <= 2e-2 * full.norm()


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_the_table_of_attention_are_true(name: Any) -> None:
    """bf16 against fp64: 3e-2; a GPU without the kernel refuses it in words."""
    found = (complaint(name, form, 3e-2) for form in forms("cuda", "bfloat16"))
    first = next((text for text in found if text), None)
    if first is not None and "torch has no such kernel" in first:
        pytest.skip(first)
    assert first is None


@pytest.mark.parametrize("backend", ["flash", "efficient", "math"])
def test_kernels_of_blocks_agree(backend: Any) -> None:
    """bf16: 2e-2 of the norm."""
    window = None if backend == "flash" else 24
    sequence = SequenceInfo(window=window, documents=Documents(((0, 40, 64),)))
    q, k, v = (torch.randn(64, 1, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    expected = CoreAttention(0.0, backend="math")(q, k, v, sequence)
    expected.sum().backward()
    copies = [x.detach().to(CUDA, torch.bfloat16).requires_grad_() for x in (q, k, v)]
    found = CoreAttention(0.0, backend=backend)(*copies, sequence)
    found.sum().backward()
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(copies, (q, k, v), strict=True))]
    for got, full in pairs:
        assert (got.cpu().float() - full).norm() <= 2e-2 * full.norm()


def test_a_llama_with_liger_trains_as_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32, three steps: 1e-4, other kernels for norms, SwiGLU and the loss."""
    liger = pytest.importorskip("liger_kernel.transformers")
    transformers = pytest.importorskip("transformers")
    modeling = transformers.models.llama.modeling_llama
    # Liger replaces them for every later model of the process; they are restored.
    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling, name, getattr(modeling, name))
    own = transformers.LlamaForCausalLM
    monkeypatch.setattr(own, "forward", own.forward)

    class Llama(pl.LightningModule):
        def __init__(self, patch: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
            self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
            if patch:
                liger.apply_liger_kernel_to_llama(model=self.model, rope=False)
                norm = self.model.model.norm.forward
                assert norm.__func__.__module__.startswith("liger_kernel")

        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            return {"loss": self.model(batch, labels=batch).loss}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def losses(patch: bool) -> list[float]:
        record = _Losses()
        fit = pl.Trainer(
            strategy=MegatronStrategy(), accelerator="gpu", devices=1, max_steps=3, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, callbacks=[record],
        )  # fmt: skip
        tokens = torch.randint(0, 96, (12, 32), generator=torch.Generator().manual_seed(1))
        fit.fit(Llama(patch), DataLoader(tokens, batch_size=4))
        return record.losses

    assert losses(patch=True) == pytest.approx(losses(patch=False), rel=1e-4)
