"""Losses of untouched ``transformers`` models in chunks: equal to those of logits, which are there
when code reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lightning.assembly.fused_loss import fuse_losses
from megatron_lightning.errors import ShardingError
from megatron_lightning.layers.losses.lazy_logits import PendingLogits
from megatron_lightning.layers.losses.loss import CrossEntropy
from megatron_lightning.models.awaited_losses import awaited_losses
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers import hf_models
from tests.helpers.hf_models import VOCABULARY
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import trainer

transformers = pytest.importorskip("transformers", "5")

ROWS, LENGTH = 4, 24
_MADE: dict[str, Callable[[], nn.Module]] = {
    "cohere": lambda: hf_models._decoder("Cohere", logit_scale=0.25),
    "granite": lambda: hf_models._decoder("Granite", logits_scaling=3.0),
    "gemma2": lambda: hf_models._decoder("Gemma2", final_logit_softcapping=5.0),
    "phi": lambda: hf_models._decoder("Phi"),  # the output layer has a bias
}


def _build(name: str) -> Any:
    if name not in _MADE:
        return hf_models.build(name).train()
    torch.manual_seed(0)
    model = _MADE[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return model.train()


class _Largest(TorchDispatchMode):
    """Finds the most tokens with logits in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            is_logits = isinstance(x, Tensor) and x.ndim > 1 and x.shape[-1] == VOCABULARY
            if is_logits and func is not torch.ops.aten.t.default:
                self.tokens = max(self.tokens, x.numel() // VOCABULARY)
        return out


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draw)
    labels = tokens.clone()
    labels[0, :5] = -100
    return {"input_ids": tokens, "labels": labels}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, LENGTH) for name in ("llama-tied", "mixtral", "gpt2", "gemma3", "phi")),
        ("cohere", LENGTH),
        ("granite", LENGTH),
        ("gemma2", ROWS * LENGTH),  # its cap needs logits
        ("bert", ROWS * LENGTH),  # not a causal model
    ],
)
def test_losses_and_gradients_equal_those_of_logits(name: str, most: int, undo: ExitStack) -> None:
    """fp32; sums in another order."""
    plain = _build(name)
    fused = copy.deepcopy(plain)
    fuse_losses(nn.ModuleList([fused]), undo)
    for step in range(3):
        losses, batch = [], _batch(step)
        for model in (plain, fused):
            model.zero_grad()
            with _Largest() as largest:
                out = model(**batch)
                out.loss.backward()
            losses.append(out.loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        for (path, p), q in zip(plain.named_parameters(), fused.parameters(), strict=True):
            error = 0.0 if p.grad is None else float((q.grad - p.grad).norm() / p.grad.norm())
            assert error < 1e-5, f"{path} is off by {error}"
        assert largest.tokens <= (most if step else ROWS * LENGTH)  # a factor is learned first
    vocabulary = plain.get_output_embeddings()
    assert type(fused.get_output_embeddings()) is type(vocabulary)
    assert "_loss_function" not in vars(fused)


def test_the_loss_is_divided_by_what_the_caller_counts(undo: ExitStack) -> None:
    plain = _build("llama")
    fused = copy.deepcopy(plain)
    fuse_losses(nn.ModuleList([fused]), undo)
    batch = _batch(0)
    shifted = {**batch, "shift_labels": batch["labels"].roll(-1, 1)}
    for options in (
        {"num_items_in_batch": torch.tensor(7)},
        {"num_items_in_batch": 7},
        {"logits_to_keep": 0},
    ):
        for inputs in (batch, shifted):
            found = [float(model(**inputs, **options).loss) for model in (plain, fused)]
            assert found[1] == pytest.approx(found[0], rel=1e-6), options
    batch["labels"] = batch["input_ids"]
    found = [float(model(**batch, ignore_index=5).loss) for model in (plain, fused)]
    assert found[0] == found[1]  # the loss function gets logits
    nothing = torch.full_like(batch["labels"], -100)
    assert fused(batch["input_ids"], labels=nothing).loss.isnan()  # as of torch's mean of nothing


def test_logits_are_there_for_whoever_reads_them(undo: ExitStack) -> None:
    plain = _build("llama")
    fused = copy.deepcopy(plain)
    fuse_losses(nn.ModuleList([fused]), undo)
    batch = _batch(0)
    expected, logits = (model(**batch).logits for model in (plain, fused))
    assert isinstance(logits, PendingLogits) and logits.requires_grad and logits.is_leaf is False
    assert (logits.shape, logits.dtype, len(logits)) == (expected.shape, expected.dtype, ROWS)
    assert logits.pending.logits is None  # nothing so far needed them
    for read in (
        lambda x: x.argmax(-1),
        lambda x: torch.softmax(x, -1),
        lambda x: x[:, -1],
        lambda x: x.detach().numpy(),
        lambda x: x.tolist()[0][0],
        lambda x: 2.0 / x,
        lambda x: copy.deepcopy(x.detach()),
        lambda x: torch.stack([x, x]),
    ):
        torch.testing.assert_close(
            torch.as_tensor(read(logits)), torch.as_tensor(read(expected)), rtol=1e-5, atol=1e-6
        )
    grads = []
    for model, x in ((plain, expected), (fused, logits)):
        model.zero_grad()
        x.float().square().mean().backward()
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-7)
    assert isinstance(fused(**batch).logits, PendingLogits)  # read once: not a habit


def test_a_model_that_writes_into_its_logits_is_right_at_once(undo: ExitStack) -> None:
    class Banned(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            logits[..., 5] = -3.0
            return self.loss_function(logits, labels, self.config.vocab_size)

    plain = _build("llama")
    plain.__class__ = Banned
    fused = copy.deepcopy(plain)
    fuse_losses(nn.ModuleList([fused]), undo)
    batch = _batch(0)
    for _ in range(2):
        assert fused(**batch).item() == pytest.approx(plain(**batch).item(), rel=1e-6)


def test_code_that_reads_logits_in_every_step_gets_them_at_once(undo: ExitStack) -> None:
    model = _build("llama")
    fuse_losses(nn.ModuleList([model]), undo)
    kinds = []
    for step in range(4):
        logits = model(**_batch(step)).logits
        kinds.append(type(logits))
        logits.argmax(-1)
    assert kinds == [PendingLogits, PendingLogits, Tensor, Tensor]


def test_logits_of_changed_weights_are_refused(undo: ExitStack) -> None:
    model = _build("llama")
    fuse_losses(nn.ModuleList([model]), undo)
    logits = model(**_batch(0)).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    with pytest.raises(ShardingError, match="read after the weights have changed"):
        logits.argmax(-1)


def test_gradients_of_logits_are_those_of_the_loss_or_refused(undo: ExitStack) -> None:
    class Watched(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            logits.register_hook(hook=seen.append)
            return self.loss_function(logits, labels, self.config.vocab_size)

    plain = _build("llama")
    fused = copy.deepcopy(plain)
    fuse_losses(nn.ModuleList([fused]), undo)
    logits = fused(**_batch(0)).logits
    for ask in (lambda: logits.register_hook(print), logits.retain_grad):
        with pytest.raises(ShardingError, match="gradient of logits is asked for"):
            ask()
    seen: list[Tensor] = []
    for model in (plain, fused):
        model.__class__ = Watched
        model(**_batch(0)).backward()
    torch.testing.assert_close(seen[1], seen[0])


def test_logits_have_the_dtype_of_autocast(undo: ExitStack) -> None:
    model = _build("llama")
    fuse_losses(nn.ModuleList([model]), undo)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**_batch(0)).logits
        assert isinstance(logits, PendingLogits)
        assert logits.dtype == logits[:1].dtype == torch.bfloat16


@pytest.mark.slow
def test_a_compiled_call_computes_logits_in_one_graph(undo: ExitStack) -> None:
    model, batch = _build("llama"), _batch(0)
    expected = float(model(**batch).loss)
    fuse_losses(nn.ModuleList([model]), undo)
    out = torch.compile(model, fullgraph=True, backend="eager")(**batch)
    assert type(out.logits) is Tensor
    assert float(out.loss) == pytest.approx(expected, rel=1e-6)


def test_a_hook_of_the_output_layer_sees_logits(undo: ExitStack) -> None:
    model, seen = _build("llama"), []
    fuse_losses(nn.ModuleList([model]), undo)
    model.lm_head.register_forward_hook(lambda _, args, out: seen.append(type(out)))
    model(**_batch(0))
    assert seen == [Tensor]


def test_another_loss_function_gets_logits(undo: ExitStack) -> None:
    def own(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        assert type(logits) is Tensor
        return logits.sum()

    model = _build("llama")
    model.loss_function = own
    fuse_losses(nn.ModuleList([model]), undo)
    model(**_batch(0))
    assert model.loss_function is own


def test_a_failed_call_leaves_nothing_behind(undo: ExitStack) -> None:
    model = _build("llama")
    fuse_losses(nn.ModuleList([model]), undo)
    with pytest.raises(ValueError, match="exactly one"):
        model(torch.zeros(1, 1), labels=_batch(0)["labels"], inputs_embeds=3)
    assert type(model.lm_head) is nn.Linear and "_loss_function" not in vars(model)
    assert type(model(_batch(0)["input_ids"]).logits) is Tensor


def test_labels_that_are_shifted_already_and_other_losses() -> None:
    model, batch = _build("llama"), _batch(0)
    logits = model(batch["input_ids"]).logits
    for loss in (
        CrossEntropy(),
        CrossEntropy(label_smoothing=0.1, z_loss=1e-3),
        CrossEntropy(softcap=0.05),
    ):
        with awaited_losses(model, batch["labels"], loss) as losses:
            found = model(batch["input_ids"]).logits
            assert isinstance(found, PendingLogits)
            torch.testing.assert_close(losses.of(found), loss(logits, batch["labels"]))
    changed = nn.CrossEntropyLoss()
    with awaited_losses(model, batch["labels"], changed):
        assert type(model(batch["input_ids"]).logits) is Tensor


class _Fit(pl.LightningModule):
    """Records losses and the most tokens with logits."""

    def __init__(self, name: str, *, reads: bool) -> None:
        super().__init__()
        self.name = name
        self.reads = reads
        self.losses: list[float] = []
        self.tokens: list[int] = []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = _build(self.name)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with _Largest() as largest:
            out = self.model(**batch)
        self.tokens.append(largest.tokens)
        self.losses.append(float(out.loss.detach()))
        # With fsdp all steps must use the same layers.
        if batch_idx == 2 and self.reads:
            self.log("hits", (out.logits.argmax(-1) == batch["labels"]).float().mean())
        loss: Tensor = out.loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(cases: list[tuple[str, dict[str, Any] | None]]) -> list[tuple[list[float], list[int]]]:
    results = []
    for name, options in cases:
        is_fsdp = options is not None and options.get("data_parallel") == "fsdp"
        module = _Fit(name, reads=not is_fsdp)
        fit = trainer("auto" if options is None else MegatronStrategy(**options), max_steps=4)
        rows = [{k: v[0] for k, v in _batch(step).items()} for step in range(16)]
        size = ROWS // 2 if is_fsdp else ROWS
        fit.fit(module, torch.utils.data.DataLoader(rows, batch_size=size))  # type: ignore[arg-type]
        results.append((module.losses, module.tokens))
    return results


def _read_late() -> None:
    module = _Fit("phi", reads=True)
    fit = trainer(MegatronStrategy(data_parallel="fsdp"), max_steps=4)
    rows = [{k: v[0] for k, v in _batch(step).items()} for step in range(16)]
    with pytest.raises(ShardingError, match="in earlier calls they were not"):
        fit.fit(module, torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]


NAMES = ["llama-tied", "phi", "granite"]
LAYOUTS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2},
    {"data_parallel": "fsdp"},
    {"tensor_model_parallel_size": 2, "fused_loss": False},
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([*zip(NAMES, LAYOUTS, strict=True)], id="each once"),
        pytest.param([*product(NAMES, LAYOUTS)], id="all", marks=pytest.mark.slow),
    ],
)
def test_ranks_exchange_no_logits_and_train_as_one_process(
    cases: list[tuple[str, dict[str, Any]]],
) -> None:
    """fp32, 4 steps of AdamW; sums in another order."""
    plain = run_ranks(1, _fit, [(name, None) for name in NAMES])[0]
    ranks = run_ranks(2, _fit, cases, timeout_s=200)
    for index, (name, options) in enumerate(cases):
        expected, most = plain[NAMES.index(name)]
        assert most == [ROWS * LENGTH] * 4
        means = [sum(x) / 2 for x in zip(*(own[index][0] for own in ranks), strict=True)]
        assert means == pytest.approx(expected, rel=1e-5), (name, options)
        # In the first step a number is learned (granite), and all under fsdp.
        tokens = ranks[0][index][1][1:]
        limit = ROWS * LENGTH if options.get("fused_loss") is False else LENGTH
        assert max(tokens) <= limit, (name, options, tokens)


@pytest.mark.slow
def test_units_of_fsdp_cannot_compute_logits_later() -> None:
    run_ranks(2, _read_late)


class _Awaiting(_Fit):
    """Awaits losses, as :class:`HuggingFaceModule` does. Counts in runs without values as well."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = torch.roll(batch["labels"], -1, 1)
        with _Largest() as largest:
            try:
                with awaited_losses(self.model, labels, CrossEntropy()) as losses:
                    logits = self.model(input_ids=batch["input_ids"]).logits
                    loss = losses.of(logits).mean()
            finally:
                _COUNTED.append(largest.tokens)
        self.losses.append(float(loss.detach()))
        return loss


class _Labeled(_Fit):
    """Calls the model with labels, and reads logits once."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with _Largest() as largest:
            try:
                out = self.model(**batch)
            finally:
                _COUNTED.append(largest.tokens)
        self.losses.append(float(out.loss.detach()))
        if self.reads and len(self.losses) == 3:
            assert out.logits.argmax(-1).shape == batch["labels"].shape
        loss: Tensor = out.loss
        return loss


_COUNTED: list[int] = []
"""Most tokens with logits in one tensor, of each step. Ranks share the state of the module."""
PIPELINES: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_model_parallel_size": 2},
    "vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "zb": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
    "tp2 pp2": {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
    "pp2 fsdp2": {"pipeline_model_parallel_size": 2, "data_parallel": "fsdp"},
    "off": {"pipeline_model_parallel_size": 2, "fused_loss": False},
}


def _fit_in_stages(
    cases: list[tuple[type[_Fit], str, dict[str, Any] | None]],
) -> list[tuple[list[float], int, list[str]]]:
    results = []
    for kind, name, options in cases:
        _COUNTED.clear()
        is_fsdp = options is not None and "data_parallel" in options
        module = kind(name, reads=not is_fsdp)
        strategy: Any = "auto"
        if options is not None:
            strategy = MegatronStrategy(**options, micro_batch_size=1 if is_fsdp else 2)
        fit = trainer(strategy, max_steps=4)
        rows = [{k: v[0] for k, v in _batch(step).items()} for step in range(16)]
        size = ROWS // 2 if is_fsdp else ROWS
        fit.fit(module, torch.utils.data.DataLoader(rows, batch_size=size))  # type: ignore[arg-type]
        model: Any = module.model
        left = [*vars(model), *vars(model.get_output_embeddings())]
        results.append((module.losses, max(_COUNTED), left))
    return results


def _check_stages(size: int, names: list[str], layouts: list[str]) -> None:
    """fp32, 4 steps of AdamW, sums in another order. The run without values comes before the first
    micro-batch. Its targets are those of the micro-batch."""
    kinds = (_Awaiting, _Labeled)
    plain = _fit_in_stages([(kind, name, None) for kind in kinds for name in names])
    cases = [(kind, name, PIPELINES[own]) for own in layouts for kind in kinds for name in names]
    ranks = run_ranks(size, _fit_in_stages, cases, timeout_s=200)
    for index, (kind, name, options) in enumerate(cases):
        expected, _, _ = plain[kinds.index(kind) * len(names) + names.index(name)]
        found, most, left = ranks[0][index]
        assert not {"awaited", "_loss_function", "_call_with_labels"} & set(left)
        if "data_parallel" in options:
            found = [sum(x) / 2 for x in zip(found, ranks[1][index][0], strict=True)]
        count = len(found) // 4
        means = [sum(found[step : step + count]) / count for step in range(0, len(found), count)]
        assert means == pytest.approx(expected, rel=1e-5), (kind, name, options)
        if "data_parallel" not in options:  # the first step computes logits
            is_fused = options.get("fused_loss", True) or kind is _Awaiting
            assert (most <= LENGTH) == is_fused, (kind, name, options, most)


@pytest.mark.slow
def test_the_last_stage_of_a_pipeline_computes_losses_in_chunks() -> None:
    _check_stages(2, ["granite"], ["pp2"])


@pytest.mark.slow
def test_all_pipelines_compute_losses_in_chunks() -> None:
    _check_stages(2, NAMES, ["pp2", "vpp2", "zb", "off"])
    _check_stages(4, ["phi", "granite"], ["tp2 pp2", "pp2 fsdp2"])
