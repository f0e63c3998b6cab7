"""Random Hadamard transform of the tokens of a matrix (https://arxiv.org/abs/2404.00456;
arXiv:2509.25149, section 3.3).

Both operands of dW = dY^T X are multiplied by the same orthogonal matrix, in blocks of 16 tokens,
so the result is unchanged. An outlier of one token is spread over 16 tokens, and a format with few
values represents spread values better. The signs are Transformer Engine's, fixed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS = 16
"""Tokens mixed together."""
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotation(device: torch.device) -> Tensor:
    """Return the orthogonal matrix [16, 16] in fp32. The entries are 1/4 and -1/4."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < TOKENS:
        above = torch.cat((matrix, matrix), dim=1)
        matrix = torch.cat((above, torch.cat((matrix, -matrix), dim=1)))
    return matrix * torch.tensor(_SIGNS, device=device) / 4.0


def rotate(x: Tensor) -> Tensor:
    """Transform tokens: [t, n] -> fp32 [t, n], padded with zeros to a multiple of 16 tokens."""
    x = F.pad(x.float(), (0, 0, 0, -len(x) % TOKENS))
    blocks = x.reshape(len(x) // TOKENS, TOKENS, x.shape[1])
    return torch.matmul(rotation(x.device), blocks).flatten(0, 1)
