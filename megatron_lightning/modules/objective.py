"""Training of a language module's model by another loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from megatron_lightning.config import TransformerConfig
from megatron_lightning.errors import ConfigError
from megatron_lightning.models.router_loss import coefficient_of
from megatron_lightning.modules.causality import check_causal
from megatron_lightning.modules.folder_module import FolderModule
from megatron_lightning.modules.gpt import GPTLightningModule
from megatron_lightning.modules.hugging_face import HuggingFaceModule
from megatron_lightning.parallel.grid.context import ParallelContext

_KNOWN: Mapping[str, type[FolderModule]] = {
    kind.__name__: kind for kind in (GPTLightningModule, HuggingFaceModule)
}
Template = FolderModule
"""A module that makes the model and its optimizer."""


class ObjectiveModule(FolderModule):
    """A module with the model, optimizer, schedule and adapters of another module, and a loss of
    its own. Subclasses define the loss.

    With a second, frozen model the model is a ``FrozenPair``. Otherwise the model is the other
    module's, so that checkpoints have the same names and can be exported in the same way.

    Args:
        model: The other module. Is not changed, and not part of this module.
        frozen: Module of a second model. Its optimizer and adapters do not matter.

    Raises:
        ConfigError: If the model is of another kind, or its losses need all tokens of a row.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = {}
    _has_own_options: ClassVar[bool] = False
    shares_vocabulary: ClassVar[bool] = True
    """Whether the frozen model gets rows for new tokens as well."""

    def __init__(self, model: Template, frozen: Template | None = None) -> None:
        template = template_of(model, "model")
        super().__init__(**template._settings)
        self._template = (template,)  # a module in a tuple is no child
        self._frozen = () if frozen is None else (template_of(frozen, "the frozen model"),)
        self._source = template._source
        config = getattr(template, "config", None)
        if isinstance(config, TransformerConfig):
            self.config = config
            if config.num_predicting_layers:
                raise ConfigError(
                    f"the model predicts {config.num_predicting_layers} further tokens "
                    f"(mtp_num_layers), and {type(self).__name__} has losses of answers alone. Set "
                    "it to None."
                )

    @property
    def template(self) -> Template:
        """The module with the trained model."""
        return self._template[0]

    def templates(self) -> Sequence[Template]:
        """Return the modules of the models: the trained one, and the frozen one if there is one."""
        return [*self._template, *self._frozen]

    def save_settings(self, **settings: Any) -> None:
        """Record the arguments of the constructor, for ``load_from_checkpoint``."""
        config = getattr(self, "config", None)
        # `generate` and others read the model of a checkpoint by its configuration.
        is_alone = isinstance(config, TransformerConfig) and not self._frozen
        described = {"config": cast(TransformerConfig, config).to_dict()} if is_alone else {}
        self.save_hyperparameters({"model": _entry(self.template), **described, **settings})

    @staticmethod
    def entry_of(template: Template | None) -> dict[str, Any] | None:
        """Return the plain values of a template."""
        return None if template is None else _entry(template)

    def joined(self, models: Sequence[nn.Module]) -> nn.Module:
        """Return the module of the models of :meth:`templates`, built by now."""
        [model] = models
        return model

    def with_models(self, built: Sequence[LightningModule]) -> ObjectiveModule:
        """Return a copy with the models of ``built``, which are copies of :meth:`templates`."""
        copied = copy.copy(self)
        copied._modules = dict(self._modules)
        copied.model = self.joined([cast(Any, module).model for module in built])
        return copied

    def configure_model(self) -> None:
        """Make the model, or both models. Under ``MegatronStrategy`` each rank reads only local
        shards.
        """
        if self.model is not None:
            return
        modules = [self._built(template) for template in self.templates()]
        for template in modules:
            if not hasattr(self, "config") and hasattr(template, "config"):
                self.config = template.config
        config = getattr(modules[0].model, "config", None)
        if self._frozen and hasattr(config, "get_text_config") and coefficient_of(config):
            raise ConfigError(
                f"{type(modules[0].model).__name__} has output_router_logits=True, and "
                f"{type(self).__name__} with a second model has no balancing loss. Set "
                "config_overrides={output_router_logits: false}."
            )
        self.model = self.joined([template.model for template in modules])

    def _built(self, template: Template) -> Any:
        """Return a copy of a template with its model."""
        copied = copy.copy(template)
        copied._modules = dict(template._modules)
        copied.given_mesh = self.device_mesh
        if template is self.template or self.shares_vocabulary:
            copied.new_tokens = self.new_tokens
        if not self._frozen:  # a pair of models reads its folders, and then the checkpoint
            copied.loads_from = self.loads_from
        copied.configure_model()
        return copied

    def prepare_data(self) -> None:
        """Download the folders, once a node."""
        for template in self.templates():
            template.prepare_data()

    @property
    def _checkpoint(self) -> str | None:
        return None if self._frozen else super()._checkpoint

    @property
    def context(self) -> ParallelContext | None:
        """Groups of this rank. None: there is one process, or another strategy."""
        strategy = None if self._trainer is None else self._trainer.strategy
        context = getattr(strategy, "context", None)
        return context if isinstance(context, ParallelContext) else None

    @property
    def num_pipeline_ranks(self) -> int:
        """Ranks that share the layers."""
        return 1 if self.context is None else self.context.pp.size

    def on_train_start(self) -> None:
        """Check that no logit depends on later tokens."""
        check_causal(self)

    def on_fit_start(self) -> None:
        """Warn if pipeline ranks wait for each other because of the second model."""
        super().on_fit_start()
        context = self.context
        if self._frozen and context is not None and context.pp.size > 1 == context.layout.vpp:
            rank_zero_warn(
                f"{context.pp.size} pipeline ranks hold two models with one stage each, so that "
                "some hold stages of the frozen model alone. With "
                "virtual_pipeline_model_parallel_size=2 every rank has a stage of each."
            )


def template_of(module: Any, name: str) -> Template:
    """Return a module as a template. Plain values of a checkpoint become a module.

    Raises:
        ConfigError: If the module is of another kind.
    """
    if isinstance(module, Mapping) and module.get("class_name") in _KNOWN:
        return _KNOWN[module["class_name"]](**module["init_args"])
    if type(module) in _KNOWN.values() or (
        isinstance(module, FolderModule) and not isinstance(module, ObjectiveModule)
    ):
        return cast(Template, module)
    raise ConfigError(
        f"{name} is a {type(module).__name__}; set it to a {' or a '.join(_KNOWN)}, which says "
        "which model is made and how it is optimized."
    )


def _entry(template: Template) -> dict[str, Any]:
    return {"class_name": type(template).__name__, "init_args": dict(template.hparams)}
