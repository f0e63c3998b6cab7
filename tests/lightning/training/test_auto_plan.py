"""``sharding_plan="auto"``: any module over tensor-parallel ranks equals one device, and tensor
parallelism that would split nothing is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_lightning.assembly.plans import find_plans
from megatron_lightning.errors import ConfigError, ShardingError
from megatron_lightning.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron_lightning.layers.styles import (
    ColumnParallel,
    RowParallel,
    SequenceParallel,
    VocabParallel,
)
from megatron_lightning.parallel import ShardingPlan
from megatron_lightning.resilience.failure import PeerFailure
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.trainers import trainer
from tests.lightning.support import Layout, assert_close, make_layout, run, single

AUTO = make_layout("auto", 2, 1, tensor_model_parallel_size=2, sharding_plan="auto")
AUTO_PP = make_layout(
    "auto-pp2",
    4,
    1,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    micro_batch_size=4,
    sharding_plan="auto",
)
VOCABULARY, LENGTH, WIDTH = 21, 6, 16


class Attention(nn.Module):
    """Heads of a fused projection, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head = 4

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (
            part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for part in self.c_attn(x).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class MinGPT(nn.Module):
    """Embeds, and predicts with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Mixed(nn.Module):
    """Layers of torch's own that read weights, classes that stay whole, and plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.normed = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.scaled = Scaled(WIDTH, WIDTH)
        self.read = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, 7)
        self.plain = nn.Linear(7, 4 * VOCABULARY)
        self.plain.register_forward_hook(lambda _, args, output: output / 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(self.words(ids))
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.lstm(x)[0]
        x = self.scaled(self.normed(self.conv(x.transpose(1, 2)).transpose(1, 2)))
        x = F.linear(x, self.read.weight.tanh(), self.read.bias)
        return self.plain(self.odd(x)).unflatten(-1, (4, -1)).mean(-2)


class Tokens(pl.LightningModule):
    """Predicts the next token; its step reads a weight, too."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.kinds: dict[str, str] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[0].roll(-1, 1).flatten())
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _tokens() -> DataLoader[Any]:
    ids = torch.randint(1, VOCABULARY, (24, LENGTH), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(ids), batch_size=8)


def _fit(layout: Layout, folder: str, build: Callable[[], nn.Module]) -> Any:
    module = Tokens(build)
    layout.trainer(folder, max_epochs=1, gradient_clip_val=0.5).fit(module, _tokens())
    kinds = ColumnParallelLinear | VocabParallelEmbedding
    return module.losses, [path for path, m in module.named_modules() if isinstance(m, kinds)]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("layout", "build", "split"),
    [
        (AUTO, MinGPT, 11),
        (AUTO_PP, MinGPT, None),
        (AUTO, Mixed, 4),
    ],
    ids=["minGPT", "minGPT-pp2", "mixed"],
)
def test_any_module_equals_one_device(
    layout: Layout, build: Callable[[], nn.Module], split: int | None, tmp_path: Path
) -> None:
    losses, _ = single(_fit, build)
    for own, layers in run(layout, _fit, tmp_path, build):
        assert_close(own, losses)
        assert split is None or len(layers) == split, layers


# ------------------------------------------------------------------------------- nothing is split


class Kernels(nn.Module):
    """Has no linear layer, and an embedding whose weight it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.words(ids).transpose(1, 2)).transpose(1, 2)
        return x @ self.words.weight.t()


class Planned(MinGPT):
    def __init__(self, plan: ShardingPlan) -> None:
        super().__init__()
        self.sharding_plan = lambda: plan


def _renamed() -> nn.Module:
    """Return a model of transformers under a class whose plan names other layers."""
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model._tp_plan = {"model.decoder.*.q": "colwise"}
    return model


LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("build", "plan", "message"),
    [
        (MinGPT, None, "no module of Tokens declares how it is split"),
        (Kernels, "auto", 'sharding_plan="auto" finds no linear layer whose output features 2'),
        (_renamed, None, "no entry of the tensor-parallel plan of LlamaForCausalLM .*matches one"),
        (
            lambda: Planned(ShardingPlan(modules={"h.*.ln_1": SequenceParallel()})),
            None,
            r"the sharding plan of Planned \(model\) has no row that splits one",
        ),
        (
            MinGPT,
            ShardingPlan(modules={"model.h.*.ln_1": SequenceParallel()}),
            "the table of sharding_plan has no row that splits one",
        ),
    ],
)
def test_tensor_parallelism_that_splits_nothing_is_refused(
    build: Callable[[], nn.Module], plan: Any, message: str
) -> None:
    strategy = MegatronStrategy(tensor_model_parallel_size=2, sharding_plan=plan)
    with pytest.raises(ConfigError, match=f'size is 2, and .*{message}.*sharding_plan="auto"'):
        strategy.describe(Tokens(build))


def test_it_is_refused_before_process_groups_exist() -> None:
    trainer = pl.Trainer(
        strategy=MegatronStrategy(tensor_model_parallel_size=2), accelerator="cpu", devices=2
    )
    with pytest.raises(ConfigError, match='sharding_plan="auto"'):
        trainer.fit(Tokens(MinGPT), _tokens())
    assert not torch.distributed.is_initialized()


def test_describe_says_of_the_sequence_what_the_run_says() -> None:
    text = MegatronStrategy(tensor_model_parallel_size=2, sharding_plan="auto").describe(
        Tokens(MinGPT)
    )
    assert "sequence parallel off (every layer gathers its output)" in text


def test_what_stays_whole() -> None:
    """Layers whose weight is read by any class, by two names or together with others."""
    model = Mixed()
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.head.weight = model.words.weight
    model.again = model.read
    model.plain.weight.register_hook(lambda grad: grad)
    (plan,) = find_plans(Tokens(lambda: model), "auto", 2).values()
    split = [path for path, _ in model.named_modules() if plan.style_of(f"model.{path}")]
    assert split == ["words", "encoder.linear1", "encoder.linear2", "head"]


class Initialized(Block):
    """Reads a weight to initialize the layer alone, as timm's models do."""

    def fix_init_weight(self) -> None:
        nn.init.zeros_(self.attn.c_proj.weight)


def test_a_weight_that_initialization_reads_is_split() -> None:
    (plan,) = find_plans(Tokens(Initialized), "auto", 2).values()
    assert plan.style_of("model.attn.c_proj") is not None


def test_the_command_line_takes_it() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MegatronStrategy, "strategy")
    options = ["--strategy.tensor_model_parallel_size=2", "--strategy.sharding_plan=auto"]
    strategy = parser.instantiate_classes(parser.parse_args(options)).strategy
    assert strategy.options.sharding_plan == "auto"
    with pytest.raises(ConfigError, match="sharding_plan is 'columns'"):
        MegatronStrategy(sharding_plan="columns")


# -------------------------------------------------------------------------------------- heads split


_PAIR = {
    "model.h.*.attn.c_attn": ColumnParallel(num_blocks=3),
    "model.h.*.attn.c_proj": RowParallel(),
}


class Separate(Attention):
    """Heads of three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        k = self.key(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(k, k, k, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


def _separate() -> MinGPT:
    model = MinGPT()
    for block in model.h:
        block.attn = Separate()
    return model


_KEY = {"model.h.*.attn.key": ColumnParallel(), "model.h.*.attn.c_proj": RowParallel()}
_SHARDED = {
    "model.wte": VocabParallel(gather_output=True),
    "model.wpe": SequenceParallel(),
    "model.h.*.ln_1": SequenceParallel(),
    "model.lm_head": VocabParallel(gather_output=True),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("build", "rows", "more"),
    [
        (MinGPT, _PAIR, "the outputs of c_attn are shards"),
        (_separate, _KEY, "the outputs of key are shards"),
        (_separate, {**_KEY, **_SHARDED}, r"add the row 'model\.h\.0\.attn': ParallelInput\(\)"),
    ],
    ids=["fused", "separate", "sequence"],
)
def test_a_forward_that_divides_by_all_heads_is_named(
    build: Callable[[], nn.Module], rows: dict[str, Any], more: str, tmp_path: Path
) -> None:
    assert all(run(HEADS, _explained, tmp_path, build, rows, more))


HEADS = make_layout("heads", 2, 1, tensor_model_parallel_size=2)


def _explained(
    layout: Layout, folder: str, build: Callable[[], nn.Module], rows: dict[str, Any], more: str
) -> bool:
    plan = ShardingPlan(modules=rows, sequence_dim=1)
    strategy = MegatronStrategy(tensor_model_parallel_size=2, sharding_plan=plan)
    text = rf"h\.0\.attn \(\w+\) computes with the sizes of the full .*C // self\.n_head.*{more}"
    if "row" not in more:
        text = rf"h\.0\.attn \(\w+\) computes .*{more}.*by self\.n_head, as in C // self\.n_head"
    with pytest.raises((ShardingError, PeerFailure)) as caught:
        trainer(strategy, default_root_dir=folder, max_epochs=1).fit(Tokens(build), _tokens())
    if isinstance(caught.value, ShardingError):
        caught.match(text)
    return True
