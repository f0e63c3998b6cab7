"""A small language model of torch's own layers, as a user would write it for a pipeline."""

from __future__ import annotations

from torch import Tensor, nn

VOCABULARY, SEQUENCE, HIDDEN = 17, 8, 16


class ToyDecoder(nn.Module):
    def __init__(self, num_layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerEncoderLayer(
                    HIDDEN, 2, 32, dropout=dropout, batch_first=True, norm_first=True
                )
                for i in range(num_layers)
            }
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def pipeline_units(self) -> list[str]:
        return ["embed", *(f"layers.{key}" for key in self.layers), "norm", "head"]

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(
            h.shape[1], device=h.device, dtype=h.dtype
        )
        for layer in self.layers.values():
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))
