"""Mamba-2 on one process: the scan against the recurrence, the mixer against ``transformers``,
documents against documents alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lightning.assembly.checks.attention_rows import bound_attention
from megatron_lightning.config import DeltaNetConfig, MambaConfig, TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.layers.state_space.convolution import causal_convolution
from megatron_lightning.layers.state_space.kernel import fused_scan
from megatron_lightning.layers.state_space.mamba import MambaMixer
from megatron_lightning.layers.state_space.mixer import StateMixer
from megatron_lightning.layers.state_space.scan import carried_states, chunked_scan
from megatron_lightning.models import GPTModel
from megatron_lightning.optim.param_groups import make_param_groups
from megatron_lightning.parallel.grid.context import AxisGroup
from tests.helpers.layouts import tiny_config

LENGTH, SIZE, HEADS, CHANNELS, GROUPS, STATE = 150, 2, 4, 3, 2, 5
EXACT = 1e-12  # fp64, sums in another order
HIDDEN = 32
MAMBA = MambaConfig(head_dim=8, num_groups=2, state_dim=8, chunk_size=16)


def _config(**options: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "vocab_size": 50,
        "layer_pattern": ["mamba", "mamba"], "mamba": MAMBA,
    }  # fmt: skip
    return tiny_config(**sizes | options)


def _inputs(length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(length, SIZE, HEADS, CHANNELS),
        "dt": F.softplus(normal(length, SIZE, HEADS)),
        "a": -15 * torch.rand(HEADS, generator=generator, dtype=torch.float64),
        "b": normal(length, SIZE, GROUPS, STATE),
        "c": normal(length, SIZE, GROUPS, STATE),
    }


def _recurrence(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what :func:`chunked_scan` returns, one position after the other."""
    b, c = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (b, c))
    rows = []
    for t in range(len(x)):
        decay = (dt[t] * a).exp()
        if t:
            decay = decay * (documents[t] == documents[t - 1]).to(decay.dtype)[:, None]
        added = torch.einsum("bh,bhn,bhp->bhpn", dt[t], b[t], x[t])
        state = decay[..., None, None] * state + added
        rows.append(torch.einsum("bhn,bhpn->bhp", c[t], state))
    return torch.stack(rows), state


@pytest.mark.parametrize("chunk", [1, 2, 16, 64, 256])
def test_the_scan_is_the_recurrence(chunk: int) -> None:
    """Chunks of 1 carry 150 states in two levels; 64 does not divide the length."""
    inputs = _inputs()
    zero = torch.zeros(SIZE, HEADS, CHANNELS, STATE, dtype=torch.float64)
    numbers = (torch.rand(LENGTH, SIZE, generator=torch.Generator().manual_seed(2)) < 0.05).long()
    for documents in (None, numbers.cumsum(0), numbers[:, :1].cumsum(0)):
        rows = torch.zeros_like(numbers) if documents is None else documents.expand(-1, SIZE)
        for start in (None, zero + torch.arange(float(STATE))):
            y, last = chunked_scan(**inputs, chunk=chunk, documents=documents, start=start)
            before = zero if start is None else start
            expected, state = _recurrence(**inputs, documents=rows, state=before)
            torch.testing.assert_close(y, expected, rtol=EXACT, atol=EXACT)
            torch.testing.assert_close(last, state, rtol=EXACT, atol=EXACT)


def test_a_second_part_continues_the_first() -> None:
    inputs, cut = _inputs(), 70
    documents = (torch.arange(LENGTH) >= cut - 20).long()[:, None].expand(-1, SIZE).clone()
    documents[cut:, 1] += 1  # of the second row, a document begins with the second part
    whole, end = chunked_scan(**inputs, chunk=16, documents=documents)
    first, second = (
        {name: t if name == "a" else t[part] for name, t in inputs.items()}
        for part in (slice(cut), slice(cut, None))
    )
    y, state = chunked_scan(**first, chunk=16, documents=documents[:cut])
    z, last = chunked_scan(
        **second, chunk=16, documents=documents[cut:], document_before=documents[cut - 1],
        start=state,
    )  # fmt: skip
    torch.testing.assert_close(torch.cat([y, z]), whole, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(last, end, rtol=EXACT, atol=EXACT)


def test_gradients_of_strong_decays_are_finite() -> None:
    """The exponential of a masked pair would overflow."""
    inputs = {name: t.float().requires_grad_() for name, t in _inputs().items()}
    y, last = chunked_scan(**inputs, chunk=128)
    (y.sum() + last.sum()).backward()
    for name, t in inputs.items():
        assert t.grad is not None and t.grad.isfinite().all(), name


def test_states_are_carried_in_two_levels() -> None:
    generator = torch.Generator().manual_seed(3)
    decays = -torch.rand(70, SIZE, HEADS, generator=generator)
    added = torch.randn(70, SIZE, HEADS, CHANNELS, STATE, generator=generator)
    documents = (torch.rand(70, 1, generator=generator) < 0.1).long().cumsum(0)
    state, rows = torch.zeros_like(added[0]), []
    for z in range(70):
        same = z == 0 or bool(documents[z] == documents[z - 1])
        state = added[z] + same * decays[z].exp()[..., None, None] * state
        rows.append(state)
    # fp32, sums in another order.
    torch.testing.assert_close(carried_states(decays, added, documents), torch.stack(rows))


def test_the_convolution_is_torchs() -> None:
    x, weight, bias = torch.randn(20, 2, 6), torch.randn(6, 1, 4), torch.randn(6)
    expected = F.conv1d(x.permute(1, 2, 0), weight, bias, padding=3, groups=6)[..., :20]
    torch.testing.assert_close(causal_convolution(x, weight, bias), expected.permute(2, 0, 1))
    rest = causal_convolution(x[7:], weight, bias, before=x[4:7])
    torch.testing.assert_close(rest, expected.permute(2, 0, 1)[7:])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_mixer_is_that_of_transformers(groups: int, recompute: bool) -> None:
    """Outputs and gradients. The scan of transformers is fp32 in any case: 1e-6."""
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    theirs = mamba2.Mamba2Mixer(
        mamba2.Mamba2Config(
            hidden_size=HIDDEN, num_heads=8, head_dim=8, n_groups=groups, state_size=8, expand=2,
            chunk_size=8, layer_norm_epsilon=1e-5, num_hidden_layers=1, use_bias=False,
        ),
        0,
    ).double().train()  # fmt: skip
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    sizes = MambaConfig(
        head_dim=8, num_groups=groups, state_dim=8, chunk_size=16, recompute_scan=recompute
    )
    ours = MambaMixer(_config(), sizes).double()
    ours.load_state_dict(theirs.state_dict())
    hidden = torch.randn(2, 37, HIDDEN, dtype=torch.float64, requires_grad=True)
    swapped = hidden.detach().transpose(0, 1).requires_grad_()
    expected, out = theirs(hidden), ours(swapped)
    target = torch.randn_like(expected)
    (expected * target).sum().backward()
    (out * target.transpose(0, 1)).sum().backward()

    def close(found: Tensor | None, wanted: Tensor | None, name: str) -> None:
        assert found is not None and wanted is not None
        difference = (found - wanted).detach().abs().max() / wanted.detach().abs().max()
        assert float(difference) < 1e-6, name

    close(out.transpose(0, 1), expected, "output")
    assert swapped.grad is not None
    close(swapped.grad.transpose(0, 1), hidden.grad, "input")
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        close(parameter.grad, gradients[name], name)


def test_documents_are_computed_as_if_alone() -> None:
    model = GPTModel(_config())
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(4))
    ends = ((13,), (5, 29))
    ids = torch.stack([(torch.arange(40)[:, None] >= torch.tensor(row)).sum(1) for row in ends])
    together = model(tokens, document_ids=ids)
    for row, inner in enumerate(ends):
        for start, stop in zip((0, *inner), (*inner, 40), strict=True):
            alone = model(tokens[row : row + 1, start:stop])[0]
            torch.testing.assert_close(together[row, start:stop], alone)


def test_decays_and_step_sizes_stay_in_fp32_without_weight_decay() -> None:
    model = GPTModel(_config()).bfloat16()
    mixer = model.decoder.layers["0"].mixer
    assert {mixer.A_log.dtype, mixer.D.dtype, mixer.dt_bias.dtype} == {torch.float32}
    assert mixer.in_proj.weight.dtype == torch.bfloat16
    tokens = torch.randint(0, 50, (2, 20))
    model(tokens, labels=tokens).mean().backward()
    assert mixer.A_log.grad.dtype == torch.float32
    groups = make_param_groups(model, lr=1e-3, weight_decay=0.1)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed.isdisjoint(map(id, (mixer.A_log, mixer.D, mixer.dt_bias)))
    assert id(mixer.conv1d.weight) in decayed


def test_initial_values_are_of_the_authors() -> None:
    sizes = MambaConfig(head_dim=1, num_groups=1, state_dim=4)
    model = GPTModel(_config(mamba=sizes, layernorm_zero_centered_gamma=True))
    mixer = model.decoder.layers["0"].mixer
    rates, steps = mixer.A_log.detach().exp(), F.softplus(mixer.dt_bias.detach())
    assert 1 <= float(rates.min()) < 3 and 14 < float(rates.max()) <= 16
    assert 1e-3 <= float(steps.min()) < 2e-3 and 0.05 < float(steps.max()) <= 0.1001
    assert set(mixer.D.tolist()) == set(mixer.norm.weight.tolist()) == {1.0}
    assert 0.4 < float(mixer.conv1d.weight.detach().abs().max()) <= 0.5


def test_the_kernel_gets_the_scan_of_full_rows() -> None:
    """mamba_ssm's arguments and layout, by a function of its signature that computes the same."""
    inputs = {name: t.float() for name, t in _inputs().items()}
    documents = (torch.arange(LENGTH) >= 70).long()[:, None]
    seen: list[tuple[Any, ...]] = []

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Any = None,
             z: Any = None, dt_bias: Any = None, initial_states: Any = None, seq_idx: Any = None
             ) -> Tensor:  # fmt: skip
        seen.append(
            (tuple(x.shape), tuple(B.shape), chunk_size, seq_idx.dtype, tuple(seq_idx.shape))
        )
        y, _ = chunked_scan(
            x.transpose(0, 1), dt.transpose(0, 1), A, B.transpose(0, 1), C.transpose(0, 1),
            chunk=chunk_size, documents=seq_idx.t().long(),
        )  # fmt: skip
        return y.transpose(0, 1)

    y = fused_scan(**inputs, chunk=16, documents=documents, dtype=torch.float32, scan=scan)
    expected, _ = chunked_scan(**inputs, chunk=16, documents=documents)
    torch.testing.assert_close(y, expected)
    shapes = ((SIZE, LENGTH, HEADS, CHANNELS), (SIZE, LENGTH, GROUPS, STATE))
    assert seen == [(*shapes, 16, torch.int32, (SIZE, LENGTH))]


def test_a_kernel_that_cannot_run_is_refused() -> None:
    required = MambaConfig(head_dim=8, num_groups=2, state_dim=8, scan_engine="mamba_ssm")
    with pytest.raises(ConfigError, match="whose kernel runs on CUDA, not cpu"):
        MambaMixer(_config(), required)(torch.zeros(3, 1, HIDDEN))
    with pytest.raises(ConfigError, match=r"mamba\.scan_engine is 'triton', which is unknown"):
        MambaConfig(scan_engine="triton")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Mamba-2", "gated delta net"])
def test_full_sequences_outside_of_steps_are_refused(kind: str) -> None:
    """A mixer bound to context-parallel ranks would scan a full sequence as a part of a longer
    one.
    """
    sizes = DeltaNetConfig(num_key_heads=2, num_value_heads=2, key_head_dim=8, value_head_dim=8)
    pattern = ["mamba" if kind == "Mamba-2" else "delta_net", "mlp"]
    options: dict[str, Any] = (
        {"mamba": MAMBA} if kind == "Mamba-2" else {"mamba": None, "delta_net": sizes}
    )
    model = GPTModel(_config(layer_pattern=pattern, **options))
    assert not bound_attention(model)
    (mixer,) = (child for child in model.modules() if isinstance(child, StateMixer))
    mixer.context_group = AxisGroup("cp", (0, 1), 0, None)
    assert list(bound_attention(model).values()) == [mixer]
    mixer.takes_parts = False
    with pytest.raises(ConfigError, match=f"whose {kind} is bound .* called outside of a training"):
        model(torch.zeros(1, 8, dtype=torch.long))
