"""KTO on single answers equals torch on one process, and its loss that of TRL."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

pytest.importorskip("transformers", "5")

from megatron_lightning.config import PipelineOptions
from megatron_lightning.errors import ConfigError, DataError
from megatron_lightning.layers.losses.unpaired_loss import UnpairedLoss
from megatron_lightning.modules import PreferenceDataModule, UnpairedDataModule
from megatron_lightning.strategies import MegatronStrategy
from tests.helpers.adapted import VOCABULARY, adapted_llama, llama
from tests.helpers.chats import make_tokenizer, write_rows
from tests.helpers.layouts import CP, MICRO, PP, TP, VPP
from tests.helpers.preferences import RATE, Preferred, make_folders, template
from tests.helpers.ranks import run_ranks
from tests.helpers.trainers import Losses, trainer

STEPS, BATCH, LENGTH = 3, 6, 16
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "micro-1": (1, 1, {MICRO: 1}),
    "micro-2": (1, 1, {MICRO: 2}),
    "tp": (2, 1, {TP: 2}),
    "pp": (2, 1, {PP: 2, VPP: 2, MICRO: 2}),
    "cp": (2, 1, {CP: 2}),
    "zero1": (2, 2, {MICRO: 1}),
    "fsdp": (2, 2, {"data_parallel": "fsdp"}),
}


def make_rows() -> list[dict[str, Tensor]]:
    draws, rows = torch.Generator().manual_seed(4), []
    for number in range(STEPS * BATCH):
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=draws)
        labels = tokens[1:].clone()
        labels[: 2 + number % 4] = labels[8 + number * 5 % 8 :] = -100
        desirable = torch.tensor(number % 3 != 0)
        row = torch.tensor(number)
        rows.append({"tokens": tokens[:-1], "labels": labels, "desirable": desirable, "row": row})
    return rows


def _score(model: Any, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the log-probabilities of answers behind prompts, one text after another."""
    scores = []
    for prompt, answer in rows:
        text = torch.cat([prompt, answer])[None]
        log_p = model(text[:, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1)
        scores.append(log_p.gather(-1, answer[:, None]).sum())
    return torch.stack(scores)


def alone(kind: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Train with torch alone: losses, norms, divergences, and the last step's mean rewards of both
    kinds of answers.
    """
    policy = adapted_llama(zero=True) if kind == "adapters" else llama()
    reference, trained = llama(), [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    losses, norms, divergences = [], [], []
    rows = make_rows()
    for at in range(0, len(rows), BATCH):
        chunk = rows[at : at + BATCH]
        texts = []
        for row in chunk:
            first = int((row["labels"] != -100).nonzero()[0])
            texts.append((row["tokens"][: first + 1], row["labels"][row["labels"] != -100]))
        mismatched = [(texts[n][0], texts[n - 1][1]) for n in range(BATCH)]
        with torch.no_grad():
            before = _score(reference, texts)
            divergence = (_score(policy, mismatched) - _score(reference, mismatched)).mean()
        desirable = torch.stack([row["desirable"] for row in chunk])
        difference = _score(policy, texts) - before
        rewards = [0.3 * difference[kind].mean().item() for kind in (desirable, ~desirable)]
        loss = UnpairedLoss(beta=0.3, undesirable_weight=1.5)(
            difference, desirable, divergence.clamp(min=0)
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trained]).item())
        divergences.append(divergence.clamp(min=0).item())
        optimizer.step()
    return losses, norms, divergences, rewards


def train(
    folder: str, kind: str, options: dict[str, Any], data: int = 1, **of_fit: Any
) -> tuple[list[float], list[float], list[float]]:
    """Train on the ranks of this process's group; return losses, norms, and the last divergence and
    rewards.
    """
    explicit = PipelineOptions(explicit_steps=True)
    strategy = MegatronStrategy(pipeline_options=explicit, **options)
    record = Losses()
    fit = trainer(strategy, max_steps=STEPS, callbacks=[record], **of_fit)
    adapters = kind == "adapters"
    module = Preferred(
        template("llama" if adapters else kind, folder, adapters=adapters),
        loss="kto",
        beta=0.3,
        undesirable_weight=1.5,
    )
    rows: Any = make_rows()
    fit.fit(module, DataLoader(rows, batch_size=BATCH // data))
    names = ("kl", "rewards_desirable", "rewards_undesirable")
    return record.losses, record.norms, [float(fit.callback_metrics[name]) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_folders(str(tmp_path_factory.mktemp("models")))


_USUAL = [("llama", "one"), ("adapters", "micro-2")]
_ALL = [
    (kind, layout)
    for kind in ("gpt", "llama", "adapters")
    for layout in LAYOUTS
    if kind == "gpt" or layout != "cp"
]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [pytest.param(*one, marks=() if one in _USUAL else pytest.mark.slow) for one in _ALL],
)
def test_kto_equals_torch(folder: str, kind: str, layout: str) -> None:
    """The divergence is that of the whole step, whatever micro-batches and replicas."""
    losses, norms, divergences, rewards = alone(kind)
    world, data, options = LAYOUTS[layout]
    for own, own_norms, logged in run_ranks(
        world, train, folder, kind, options, data, timeout_s=200
    ):
        assert own_norms == pytest.approx(norms, rel=1e-5)  # fp32, sums in another order
        assert own == pytest.approx(losses, rel=1e-5) or data > 1
        assert logged == pytest.approx([divergences[-1], *rewards], rel=1e-4, abs=1e-6)
    assert divergences[-1] > 0


def test_the_loss_is_that_of_trl() -> None:
    """TRL's method, cut out of its file, where its micro-batch is the step."""
    source = Path(pytest.importorskip("trl").__file__).parent / "trainer/kto_trainer.py"
    [method] = [
        node
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "_compute_loss"
    ]
    end = next(n for n, one in enumerate(method.body) if "losses = torch.cat" in ast.unparse(one))
    method.body = [*method.body[: end + 1], *ast.parse("return losses.mean(), kl").body]
    scope: dict[str, Any] = {"torch": torch, "F": F, "is_peft_model": lambda _: False}
    exec(compile(ast.Module(body=[method], type_ignores=[]), str(source), "exec"), scope)
    draws = torch.Generator().manual_seed(2)
    policy, reference = 3 * torch.randn((2, 6, 5), generator=draws, dtype=torch.float64) - 3
    mismatched = torch.randn((2, 6), generator=draws, dtype=torch.float64)
    policy.requires_grad_()
    me = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        aux_loss_enabled=False, precompute_ref_logps=True, calculate_KL=True, loss_type="kto",
        beta=0.3, desirable_weight=1.2, undesirable_weight=0.7,
        _compute_kl_logps=lambda model, batch: mismatched[0],
    )  # fmt: skip
    model = SimpleNamespace(training=True)
    label = torch.tensor([True, False, True, True, False, False])
    ids = torch.zeros((6, 6), dtype=torch.long)
    inputs = {
        "label": label, "input_ids": ids, "completion_mask": ids,
        "ref_logps": reference.sum(-1), "ref_KL_logps": mismatched[1],
    }  # fmt: skip
    outputs = SimpleNamespace(log_probs=policy)

    class Model(SimpleNamespace):
        def __call__(self, **_: Any) -> Any:
            return outputs

    me.model = model
    theirs, kl = scope["_compute_loss"](me, Model(training=True), inputs, False)
    loss = UnpairedLoss(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    divergence = (mismatched[0] - mismatched[1]).mean().clamp(min=0)
    ours = loss(policy.sum(-1) - reference.sum(-1), label, divergence).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    assert kl.item() == pytest.approx(divergence.item(), rel=1e-12)
    own, other = (torch.autograd.grad(x, policy)[0] for x in (ours, theirs))
    assert torch.allclose(own, other, rtol=1e-12)


def test_rows_with_labels_and_pairs_train(folder: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(vocab_size=VOCABULARY if VOCABULARY > 260 else 320)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"prompt": [{"role": "user", "content": "what is"}], "label": number % 2 == 0,
         "completion": [{"role": "assistant", "content": "blue " * (1 + number % 3)}]}
        for number in range(8)
    ]  # fmt: skip
    given: dict[str, Any] = {
        "sequence_length": 32, "batch_size": 4, "tokenizer": str(tmp_path / "tokenizer"),
        "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    data = UnpairedDataModule(write_rows(tmp_path / "rows.jsonl", rows), **given)
    data.prepare_data()
    data.setup("fit")
    [first, second] = list(data.train_dataloader())
    numbers = torch.cat([first["row"], second["row"]])
    labels = torch.cat([first["desirable"], second["desirable"]])
    assert numbers.sort().values.tolist() == [*range(8)]
    assert (labels == (numbers % 2 == 0)).all()
    counts = (torch.cat([first["labels"], second["labels"]]) != -100).sum(1)[numbers.argsort()]
    assert counts[:3].tolist() == counts[3:6].tolist() and counts[0] < counts[1] < counts[2]
    wrong = write_rows(tmp_path / "wrong.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(DataError, match=r"wrong.jsonl:1: label is None"):
        UnpairedDataModule(wrong, **given).prepare_data()
    assert PreferenceDataModule.sequence_dims.keys() <= Preferred.sequence_dims.keys()


def test_what_cannot_work_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches to 1"):
        train(folder, "llama", {}, 2, accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match="mismatched rows"):
        Preferred(template("llama", folder, adapters=False), loss="kto", reference="scores")
    for name in ("beta", "desirable_weight"):
        with pytest.raises(ConfigError, match="must be positive"):
            UnpairedLoss(**{name: 0.0})
