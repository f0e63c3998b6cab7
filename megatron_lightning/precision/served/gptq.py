"""Codes of int4 that lose least of a layer's outputs on seen inputs (GPTQ, arXiv:2210.17323).

With H = X^T X of the inputs X [tokens, C], the columns of a weight are rounded one after the other,
and each column's error is made up for by the columns that follow:

    U^T U = H^-1, U upper triangular
    e_j   = (w_j - Q(w_j)) / U_jj
    w_k  -= e_j U_jk  for k > j
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lightning.errors import CheckpointError
from megatron_lightning.precision.served.values import (
    LARGEST_INTEGER,
    Encoded,
    ServedFormat,
    encode,
)

# Of the mean of H's diagonal. The first is the paper's; sums of few tokens in fp32 may need more.
_DAMPINGS = (0.01, 0.1, 1.0)


@torch.no_grad()
def gptq_codes(weight: Tensor, form: ServedFormat, upper: Tensor) -> Encoded:
    """Return codes and scales of a weight [R, C].

    Args:
        weight: The weight.
        form: int4. A scale is chosen by the largest value, when its columns' turn has come.
        upper: U [C, C] of the layer's inputs.
    """
    weight = weight.float().clone()
    size, columns = form.block.columns or weight.shape[1], weight.shape[1]
    largest = LARGEST_INTEGER[form.name]
    codes, scales = torch.empty_like(weight), []
    for start in range(0, columns, size):
        group = slice(start, min(start + size, columns))
        scale = encode(weight[:, group], form).scales
        errors = torch.empty_like(weight[:, group])
        for number, j in enumerate(range(*group.indices(columns))):
            code = (weight[:, j] / scale[:, 0]).round().clamp(-largest - 1, largest)
            errors[:, number] = (weight[:, j] - code * scale[:, 0]) / upper[j, j]
            weight[:, j : group.stop] -= torch.outer(errors[:, number], upper[j, j : group.stop])
            codes[:, j] = code
        weight[:, group.stop :] -= errors @ upper[group, group.stop :]
        scales.append(scale)
    return Encoded(codes, torch.cat(scales, -1), None)


def factor(moments: Tensor) -> Tensor:
    """Return U of damped H [C, C], in fp32.

    Raises:
        CheckpointError: If H is not that of inputs.
    """
    moments = moments.double()
    diagonal = moments.diagonal()
    unseen = (diagonal == 0).double()  # an input that was always 0 makes up for none
    for damping in _DAMPINGS:
        damped = moments + torch.diag(damping * diagonal.mean() + unseen)
        lower, problem = torch.linalg.cholesky_ex(damped)
        if not int(problem) and bool(lower.isfinite().all()):
            upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            return upper.float()
    raise CheckpointError(
        f"the second moments {list(moments.shape)} of a layer's inputs are not positive definite: "
        "they are damaged, or had values that are NaN or infinite. Take them again."
    )
