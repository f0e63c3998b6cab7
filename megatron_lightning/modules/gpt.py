"""``GPTModel`` as an ordinary LightningModule: it runs on one device and under ``MegatronStrategy``
unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lightning.config import TransformerConfig
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules.language_model import LanguageModule


class GPTLightningModule(LanguageModule):
    """:class:`GPTModel` trained with AdamW.

    Args:
        config: The model.
        options: Options of :class:`LanguageModule`: optimizer, learning rate schedule, adapters.

    Raises:
        ConfigError: If the schedule contradicts itself.
    """

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(**options)
        if not isinstance(config, TransformerConfig):
            # From `load_from_checkpoint`: a checkpoint holds plain values only.
            config = TransformerConfig(**config)
        self.save_hyperparameters({"config": config.to_dict(), **self._settings})
        self.config = config
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        """Build the model, on ``meta`` where the strategy materializes only a part of it."""
        if self.model is not None:
            return
        mesh = self.device_mesh
        parallel = mesh is not None and "pp" in (mesh.mesh_dim_names or ())
        with torch.device("meta" if parallel else torch.empty(0).device):
            self.model = self._adapt(GPTModel(self.config))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the model's logits [b, s, v], or with labels the tokens' losses [b, s]."""
        if self.model is None:
            self.configure_model()
        inputs = {"labels": labels, "position_ids": position_ids}
        if document_ids is not None:
            inputs["document_ids"] = document_ids
        out: Tensor = self.model(tokens, **inputs)  # type: ignore[misc]
        return out
