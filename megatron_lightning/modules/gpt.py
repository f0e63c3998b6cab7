"""``GPTModel`` as an ordinary LightningModule, for one device and ``MegatronStrategy`` alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.config import TransformerConfig
from megatron_lightning.config.class_paths import config_of_checkpoint
from megatron_lightning.errors import ConfigError, MissingCheckpointError
from megatron_lightning.models.transformer import GPTModel
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.language_model import Batch


class GPTLightningModule(FolderModule):
    """:class:`GPTModel` trained with AdamW, from initial weights or from a Hugging Face folder.

    Args:
        config: The model. May be left out with ``init_from_hf``. With ``init_from_hf`` the
            configuration describes the folder's model, with options of training such as dropout or
            balancing losses.
        init_from_hf: Folder or Hub id of the initial weights, for families with rules
            (``docs/hugging_face.md``). Default: random initial weights.
        revision: Branch, tag or commit of the Hub id. Default: main.
        family: Rules for the folder, by name or as the class path of your own. Default: the rules
            of the folder's architecture.
        trust_remote_code: Whether code in the folder may run.
        options: Options of :class:`LanguageModule`: optimizer, learning rate schedule, adapters.

    Raises:
        ConfigError: If the schedule contradicts itself, there is neither a configuration nor a
            folder, or :class:`GPTModel` cannot represent a setting of the folder.
    """

    def __init__(
        self,
        config: TransformerConfig | None = None,
        *,
        init_from_hf: str | None = None,
        revision: str | None = None,
        family: str | None = None,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        origin = {"revision": revision, "family": family, "trust_remote_code": trust_remote_code}
        # `load_from_checkpoint` gives the plain values of a checkpoint first, and then the weights.
        is_loaded = isinstance(config, Mapping)
        if isinstance(config, Mapping):
            config = config_of_checkpoint(config)
        if init_from_hf is not None and not is_loaded:
            self._source = {"path": init_from_hf, **origin}
            if config is None:
                config = self._config_of_folder()
        if config is None and self._source is None:
            raise ConfigError(
                "config and init_from_hf are left out, so that the model is unknown. Set config "
                "to a TransformerConfig, or init_from_hf to a Hugging Face folder or to a "
                "checkpoint of convert import (beside ckpt_path, if its state of Adam goes on)."
            )
        self._started = {} if init_from_hf is None else {"init_from_hf": init_from_hf, **origin}
        if self.maximal_update is not None and init_from_hf is not None and not is_loaded:
            raise ConfigError(
                "maximal_update is given beside init_from_hf: the folder's weights were trained "
                "with other factors of logits and learning rates. Leave one of them out."
            )
        if config is not None:
            rule = self.maximal_update
            # The configuration of a checkpoint has the factors.
            self._set_config(config if rule is None or is_loaded else rule.scaled(config))

    def _config_of_folder(self) -> TransformerConfig | None:
        """Return the configuration of the folder. None: there is no such folder. A checkpoint
        loaded by the run may keep the configuration.
        """
        try:
            config = AutoBridge.from_hf_pretrained(**(self._source or {})).to_config()
        except MissingCheckpointError:
            return None
        if config.moe is not None and config.moe.aux_loss_coeff:
            rank_zero_info(
                "the folder has output_router_logits=True: experts are balanced layer by layer "
                f"with aux_loss_coeff={config.moe.aux_loss_coeff:.4g} (router_aux_loss_coef x "
                "top_k / layers of experts), where transformers balances all layers as one."
            )
        return config

    def _set_config(self, config: TransformerConfig) -> None:
        self.save_hyperparameters({"config": config.to_dict(), **self._started, **self._settings})
        self.config = config

    def configure_model(self) -> None:
        """Build the model, on ``meta`` if the strategy materializes only a part. Under
        ``MegatronStrategy`` each rank reads only local shards from a folder.
        """
        if self.model is not None:
            return
        if self._source is not None:
            bridge = self._bridge()
            if not hasattr(self, "config"):
                self._set_config(bridge.to_config())
            if bridge.grown is not None:
                self._set_config(replace(self.config, vocab_size=bridge.grown[0]))
            self.model = self._adapt(bridge.to_model("gpt", config=self.config))
            return
        mesh = self.given_mesh or self.device_mesh
        parallel = mesh is not None and "pp" in (mesh.mesh_dim_names or ())
        with torch.device("meta" if parallel else torch.empty(0).device):
            self.model = self._adapt(GPTModel(self.config, self.maximal_update))

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return the optional inputs of ``forward`` in a batch."""
        config = self.config
        reads_padding = config.moe is not None or config.longest_short_document is not None
        given = {"padding": batch["padding"]} if reads_padding and "padding" in batch else {}
        return super()._inputs(batch) | given

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        routes: Tensor | None = None,
        *,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Return the model's logits [b, s, v], or with labels the tokens' losses [b, s].

        For ``routes`` [b, s, m, k] and ``padding`` [b, s] see :class:`GPTModel`.
        """
        if self.model is None:
            self.configure_model()
        inputs = {"labels": labels, "position_ids": position_ids}
        if document_ids is not None:
            inputs["document_ids"] = document_ids
        if routes is not None:
            inputs["routes"] = routes
        if padding is not None:
            inputs["padding"] = padding
        out: Tensor = self.model(tokens, **inputs)
        return out
