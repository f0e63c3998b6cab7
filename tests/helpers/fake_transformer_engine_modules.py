"""Modules of the fake ``transformer_engine.pytorch``: the real ones' parameters and collectives,
computed by torch in fp32."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.fake_transformer_engine_tensors import Float8Tensor, rounded
from tests.helpers.process_group_functions import gather, reduce, reduce_scatter, share
from tests.helpers.te_contract import STATE, bind


def _copy(parameter: Tensor) -> Tensor:
    """Return the values, of codes the codes."""
    own = parameter._data if isinstance(parameter, Float8Tensor) else parameter
    return own.detach().clone()


class _Module(nn.Module):
    """Base: binds the constructor and every call to the real signatures."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        name = type(self).__name__
        given = bind(f"{name}.__init__", args, kwargs)
        STATE.calls.append((name, kwargs))
        self.number = STATE.num_modules
        STATE.num_modules += 1
        self.fp8_meta: dict[str, Any] = {}
        self._cached: dict[str, Tensor] = {}
        self._build(SimpleNamespace(**given, **given.get("kwargs", {})))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = bind(f"{type(self).__name__}.forward", args, kwargs)
        if "is_first_microbatch" in given:
            self._check_cache(given["is_first_microbatch"])
        with torch.autocast("cpu", enabled=False):
            return self._compute(SimpleNamespace(**given))

    def _build(self, given: SimpleNamespace) -> None:
        raise NotImplementedError

    def _compute(self, given: SimpleNamespace) -> Any:
        raise NotImplementedError

    def _add(self, name: str, *shape: int, given: SimpleNamespace) -> None:
        dtype = given.params_dtype or torch.get_default_dtype()
        value = torch.empty(*shape, device=given.device, dtype=dtype)
        if STATE.weights_recipe is not None and self._is_quantized(name):
            assert given.init_method is nn.init.zeros_
            value = Float8Tensor(*rounded(nn.init.zeros_(value)), dtype, STATE.weights_recipe)
        self.register_parameter(name, nn.Parameter(value))

    def _is_quantized(self, name: str) -> bool:
        return "weight" in name and not name.startswith("layer_norm")

    def _weight(self, name: str) -> Tensor:
        """Return a weight as it is multiplied; its gradient is straight-through."""
        weight: Tensor = getattr(self, name)
        if isinstance(weight, Float8Tensor) or not STATE.rounds_weights:
            return weight
        codes, scale_inv = rounded(weight)
        values = codes.view(torch.float8_e4m3fn).to(weight.dtype) * scale_inv
        return values + (weight - weight.detach())

    def _check_cache(self, is_first: bool | None) -> None:
        STATE.first_flags.setdefault(self.number, []).append(is_first)
        if is_first:
            self._cached = {n: _copy(p) for n, p in self._parameters.items()}
        elif is_first is not None:
            for name, parameter in self._parameters.items():
                if not torch.equal(self._cached[name], _copy(parameter)):
                    raise AssertionError(f"{name} has changed since its codes were kept")

    def _note(self, x: Tensor, num_gemms: int = 1) -> None:
        """Note the largest value of an input, as delayed scaling does."""
        enabled, recipe, group = STATE.stack[-1] if STATE.stack else (False, None, None)
        if not enabled or type(recipe).__name__ != "DelayedScaling" or STATE.recomputing:
            return
        if "registered" not in self.fp8_meta:
            self.fp8_meta |= {"recipe": recipe, "num_gemms": num_gemms, "registered": True}
            self.init_fp8_meta_tensors(recipe)
            group = group if recipe.reduce_amax else None
            STATE.histories.append((group, self.fp8_meta["scaling_fwd"].amax_history))
        history = self.fp8_meta["scaling_fwd"].amax_history
        history[0, 0] = torch.maximum(history[0, 0], x.detach().abs().amax().float())

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        """Allocate scales and histories, once."""
        for key, per_gemm in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            size = per_gemm * self.fp8_meta["num_gemms"]
            empty = SimpleNamespace(
                scale=torch.ones(size), amax_history=torch.zeros(recipe.amax_history_len, size)
            )
            self.fp8_meta.setdefault(key, empty)


class _Parallel(_Module):
    """Attributes and collectives of linear layers."""

    def _set_ranks(self, given: SimpleNamespace) -> None:
        self.tp_group = given.tp_group
        self.tp_size = given.tp_size if given.tp_group is None else given.tp_group.size()
        self.sequence_parallel = self.tp_size > 1 and given.sequence_parallel
        self.use_bias = given.bias
        for name in ("eps", "normalization", "zero_centered_gamma"):
            if hasattr(given, name):
                setattr(self, name, getattr(given, name))

    def _enter(self, x: Tensor) -> Tensor:
        if self.tp_size == 1:
            return x
        return gather(x, self.tp_group) if self.sequence_parallel else share(x, self.tp_group)

    def _leave(self, y: Tensor) -> Tensor:
        if self.tp_size == 1:
            return y
        function = reduce_scatter if self.sequence_parallel else reduce
        return function(y, self.tp_group)

    def _add_norm(self, size: int, given: SimpleNamespace) -> None:
        self._add("layer_norm_weight", size, given=given)
        if self.normalization == "LayerNorm":
            self._add("layer_norm_bias", size, given=given)

    def _norm(self, x: Tensor) -> Tensor:
        weight = self.layer_norm_weight + float(self.zero_centered_gamma)
        if self.normalization == "RMSNorm":
            return F.rms_norm(x.float(), weight.shape, weight, self.eps)
        return F.layer_norm(x.float(), weight.shape, weight, self.layer_norm_bias, self.eps)


class Linear(_Parallel):
    """Column- or row-parallel, or on one rank."""

    def _build(self, given: SimpleNamespace) -> None:
        self._set_ranks(given)
        self.parallel_mode = given.parallel_mode
        column, row = given.parallel_mode == "column", given.parallel_mode == "row"
        self.in_features = given.in_features // (self.tp_size if row else 1)
        self.out_features = given.out_features // (self.tp_size if column else 1)
        if hasattr(self, "normalization"):
            self._add_norm(self.in_features, given)
        self._add("weight", self.out_features, self.in_features, given=given)
        if given.bias:
            self._add("bias", self.out_features, given=given)

    def _compute(self, given: SimpleNamespace) -> Tensor:
        x = self._norm(given.inp) if hasattr(self, "normalization") else given.inp.float()
        self._note(x)
        if self.parallel_mode == "column":
            x = self._enter(x)
        y = F.linear(x, self._weight("weight"))
        if self.parallel_mode == "row":
            y = self._leave(y)
        return y + self.bias if self.use_bias else y


class LayerNormLinear(Linear):
    """A norm and a linear layer."""


class LayerNormMLP(_Parallel):
    """A norm and two linear layers around an activation."""

    def _build(self, given: SimpleNamespace) -> None:
        self._set_ranks(given)
        self.set_parallel_mode, self.activation = given.set_parallel_mode, given.activation
        size = self.size_per_partition = given.ffn_hidden_size // self.tp_size
        rows = 2 * size if given.activation == "swiglu" else size
        self._add_norm(given.hidden_size, given)
        self._add("fc1_weight", rows, given.hidden_size, given=given)
        if given.bias:
            self._add("fc1_bias", rows, given=given)
        self._add("fc2_weight", given.hidden_size, size, given=given)
        if given.bias:
            self._add("fc2_bias", given.hidden_size, given=given)

    def _compute(self, given: SimpleNamespace) -> Tensor:
        x = self._norm(given.inp)
        self._note(x, num_gemms=2)
        x = self._enter(x) if self.set_parallel_mode else x
        inner = F.linear(x, self._weight("fc1_weight"), self.fc1_bias if self.use_bias else None)
        if self.activation == "swiglu":
            gate, up = inner.chunk(2, -1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        y = F.linear(inner, self._weight("fc2_weight"))
        y = self._leave(y) if self.set_parallel_mode else y
        return y + self.fc2_bias if self.use_bias else y


class GroupedLinear(_Module):
    """Experts, whose rows must come in multiples of 16."""

    def _build(self, given: SimpleNamespace) -> None:
        self.num_gemms, self.use_bias = given.num_gemms, given.bias
        self.in_features, self.out_features = given.in_features, given.out_features
        self.tp_size, self.sequence_parallel, self.parallel_mode = 1, False, None
        for index in range(given.num_gemms):
            self._add(f"weight{index}", given.out_features, given.in_features, given=given)
        for index in range(given.num_gemms if given.bias else 0):
            self._add(f"bias{index}", given.out_features, given=given)

    def _compute(self, given: SimpleNamespace) -> Tensor:
        sizes = given.m_splits.tolist()
        assert all(size % 16 == 0 for size in sizes)
        self._note(given.inp, self.num_gemms)
        parts = torch.split(given.inp.float(), sizes)
        return torch.cat(
            [
                F.linear(
                    part,
                    self._weight(f"weight{i}"),
                    getattr(self, f"bias{i}") if self.use_bias else None,
                )
                for i, part in enumerate(parts)
            ]
        )


class Fp8Padding(_Module):
    """Pads the rows of each expert to a multiple of 16."""

    def _build(self, given: SimpleNamespace) -> None:
        pass

    def _compute(self, given: SimpleNamespace) -> tuple[Tensor, list[int]]:
        parts = torch.split(given.inp, given.m_splits)
        padded = [F.pad(part, (0, 0, 0, -len(part) % 16)) for part in parts]
        return torch.cat(padded), [len(part) for part in padded]


class Fp8Unpadding(Fp8Padding):
    """Removes the rows again."""

    def _compute(self, given: SimpleNamespace) -> Tensor:  # type: ignore[override]
        padded = torch.split(given.inp, [size + -size % 16 for size in given.m_splits])
        return torch.cat([part[:size] for part, size in zip(padded, given.m_splits, strict=True)])


class _Norm(_Module):
    def _build(self, given: SimpleNamespace) -> None:
        self.eps, self.zero_centered_gamma = given.eps, given.zero_centered_gamma
        self.sequence_parallel = given.sequence_parallel
        shape, factory = (given.normalized_shape,), {"device": given.device, "dtype": given.dtype}
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        if isinstance(self, LayerNorm):
            self.bias = nn.Parameter(torch.empty(shape, **factory))

    def forward(self, x: Tensor) -> Tensor:
        shape, weight = self.weight.shape, self.weight + float(self.zero_centered_gamma)
        if isinstance(self, LayerNorm):
            return F.layer_norm(x.float(), shape, weight, self.bias, self.eps)
        return F.rms_norm(x.float(), shape, weight, self.eps)


class RMSNorm(_Norm):
    """RMSNorm."""


class LayerNorm(_Norm):
    """LayerNorm."""


class DotProductAttention(_Module):
    """Attention; ranks that share sequences hold chunks r and 2c-1-r of them."""

    def _build(self, given: SimpleNamespace) -> None:
        self.given = given

    def _compute(self, given: SimpleNamespace) -> Tensor:
        q, k, v = (
            self._whole(x.float()).permute(1, 2, 0, 3)
            for x in (given.query_layer, given.key_layer, given.value_layer)
        )
        heads = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        # Not by torch's function, which the strategy expects from the model's own attention only.
        scores = q @ k.transpose(2, 3) * self.given.softmax_scale
        back = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        hidden = back < 0 if given.attn_mask_type == "causal" else back < -len(back)
        if given.window_size is not None:
            hidden = hidden | (back > given.window_size[0])
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return self._own(out.permute(2, 0, 1, 3)).flatten(2)

    def _order(self, size: int) -> list[int]:
        return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]

    def _whole(self, x: Tensor) -> Tensor:
        group = self.given.cp_group
        if group is None:
            return x
        chunks = gather(x, group).chunk(2 * group.size())
        order = self._order(group.size())
        return torch.cat([chunks[order.index(index)] for index in range(len(chunks))])

    def _own(self, x: Tensor) -> Tensor:
        group = self.given.cp_group
        if group is None:
            return x
        chunks = x.chunk(2 * group.size())
        own = self._order(group.size())[2 * group.rank() : 2 * group.rank() + 2]
        return torch.cat([chunks[index] for index in own])
