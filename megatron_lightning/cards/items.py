"""The items of a card, and the comparison in each."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lightning.bridge.auto import AutoBridge
from megatron_lightning.bridge.hf_models.logits import (
    TOLERANCE,
    compare_logits,
    logits_of,
    relative,
)
from megatron_lightning.bridge.verification import round_trip
from megatron_lightning.cards.card import Item, kind_of
from megatron_lightning.cards.layouts import NamedLayout, layout_of
from megatron_lightning.cards.subject import RecordedLogits, Subject, dropouts_of
from megatron_lightning.cards.trainings import Curve, Job, run_job
from megatron_lightning.errors import CheckpointError, ConfigError
from megatron_lightning.inference import Sampling, load_engine
from megatron_lightning.optional import require
from megatron_lightning.peft.commands import export, merge

_STEPS = 4
_PROMPT, _NEW = 8, 12
_RATE, _ADAPTER_RATE = 1e-3, 1e-2
_LISTED, _WORDS = 5, 200
_FP32 = "fp32 on both sides, with the same operations in equal order"
_SUMS = "fp32 on both sides; ranks add the same numbers in another order"
_MISSING = "missing adapter keys"  # said by peft
_EXACT = "nothing is rounded on the way"


class SkippedError(Exception):
    """An item without a measurement here. The message says why."""


@dataclass(frozen=True)
class Finding:
    """Measurement of an item."""

    expected: str
    measured: float
    tolerance: float
    reason: str
    details: Mapping[str, Any] = field(default_factory=dict)


class Verification:
    """Measures the items of a card.

    Args:
        subject: The model, for folder and logits.
        trained: The model of the other items, the same or reduced.
        layouts: Names of the layouts.
        work: Folder for checkpoints and merged models.
        reference: Expected logits. None: transformers on the same folder.
        family: Rules for a GPTModel, by name or class path. None: the architecture's.
        run: Runs a training on a layout's ranks. Raises ConfigError for a refused layout.
    """

    def __init__(
        self,
        subject: Subject,
        trained: Subject,
        layouts: Sequence[str],
        work: Path,
        *,
        reference: Subject | RecordedLogits | None = None,
        family: str | None = None,
        run: Callable[[Job], Curve] = run_job,
    ) -> None:
        self._subject = subject
        self._trained = trained
        self._layouts = [layout_of(name) for name in layouts]
        self._work = work
        self._reference = reference
        self._family = family
        self._run = run

    def ids(self) -> list[str]:
        """Return the ids of all items, in order."""
        fits = [f"fit:{layout.name}" for layout in self._layouts]
        return ["folder", "logits", *fits, "resume", "lora", "merge", "text"]

    def measure(self, item: str, command: str) -> Item:
        """Measure an item. A failure of any kind is the item's.

        Args:
            item: One of :meth:`ids`.
            command: Reruns the item.
        """
        start = time.perf_counter()
        found: dict[str, Any] = {"expected": "", "measured": None, "tolerance": None, "reason": ""}
        try:
            finding = self._work_of(item)()
        except SkippedError as skip:
            found |= {"status": "skipped", "why": str(skip)}
        except Exception as error:
            found |= {"status": "failed", "why": f"{type(error).__name__}: {error}"}
        else:
            found |= vars(finding)
            is_close = finding.measured <= finding.tolerance  # NaN is not
            found["status"] = "passed" if is_close else "failed"
            if not is_close:
                found["why"] = f"{finding.measured:.2g} is above {finding.tolerance:.2g}"
        return Item(
            id=item, command=command, seconds=round(time.perf_counter() - start, 1), **found
        )

    def _work_of(self, item: str) -> Callable[[], Finding]:
        kind, layout = kind_of(item), item.partition(":")[2]
        if kind == "fit":
            named = next(one for one in self._layouts if one.name == layout)
            return lambda: self._fit(named)
        works = {
            "folder": self._folder, "logits": self._logits, "resume": self._resume,
            "lora": self._lora, "merge": self._merge, "text": self._text,
        }  # fmt: skip
        return works[kind]

    # ------------------------------------------------------------------------------------- folder

    def _models(self) -> Iterator[tuple[str, AutoBridge]]:
        """Yield hf, and gpt if there are rules for the folder's configuration."""
        yield "hf", self._subject.bridge()
        if self._why_no_gpt is None:
            yield "gpt", self._subject.bridge(self._family)

    @cached_property
    def _why_no_gpt(self) -> str | None:
        """Why the folder is no GPTModel: no rules, or a setting. None: the folder is a
        GPTModel, and a later refusal is a fault of the rules.
        """
        try:
            self._subject.bridge(self._family).to_config()
        except ConfigError as error:
            if self._family is not None:
                raise
            return str(error).replace(str(self._subject.path), self._subject.name)[:_WORDS]
        return None

    def _folder(self) -> Finding:
        counts: dict[str, Any] = {}
        wrong: list[str] = []
        for kind, bridge in self._models():
            found = round_trip(bridge, is_gpt=kind == "gpt")
            counts[f"tensors, {kind}"] = found.num_tensors
            wrong += [f"{kind}: {name}" for name in found.differing]
        if wrong:
            counts["differing"] = wrong[:_LISTED]
        return Finding(
            "tensors that return with other bytes: none", len(wrong), 0, _EXACT,
            counts | self._note_of_gpt(),
        )  # fmt: skip

    def _note_of_gpt(self) -> dict[str, str]:
        return {} if self._why_no_gpt is None else {"no GPTModel": self._why_no_gpt}

    def _logits(self) -> Finding:
        if isinstance(self._reference, RecordedLogits):
            return self._recorded(self._reference)
        other = None if self._reference is None else self._reference.bridge()
        differences: dict[str, float] = {}
        details: dict[str, Any] = {}
        for kind, bridge in self._models():
            found = compare_logits(bridge, is_gpt=kind == "gpt", reference=other)
            differences[kind] = found.difference
            if found.block is not None:
                details[f"first other block, {kind}"] = found.block
        origin = "the same folder"
        if self._reference is not None:
            origin = f"{self._reference.name}, revision {self._reference.revision}"
        return _farthest(
            f"logits of transformers on {origin}; largest difference, relative to the largest "
            "logit", differences, TOLERANCE, _FP32, details | self._note_of_gpt(),
        )  # fmt: skip

    def _recorded(self, recorded: RecordedLogits) -> Finding:
        differences = {}
        for kind, bridge in self._models():
            logits = logits_of(bridge, recorded.tokens, is_gpt=kind == "gpt")[:, -1]
            differences[kind] = relative(logits, recorded.logits)
        return _farthest(
            "the recorded logits; largest difference, relative to the largest logit", differences,
            recorded.tolerance, recorded.reason, self._note_of_gpt(),
        )  # fmt: skip

    # --------------------------------------------------------------------------------------- fits

    def _train(self, layout: NamedLayout | None = None, **changes: Any) -> Curve:
        """Train the model on a layout. None: plain Lightning in one process."""
        if layout is not None and 0 < torch.cuda.device_count() < layout.ranks:
            raise SkippedError(
                f"{layout.name} has {layout.ranks} ranks, and this machine "
                f"{torch.cuda.device_count()} GPUs"
            )
        config = self._trained.bridge().config
        options = {
            "path": str(self._trained.path),
            "trust_remote_code": self._trained.trusts,
            "learning_rate": _RATE if changes.get("peft") is None else _ADAPTER_RATE,
            "config_overrides": dropouts_of(config) or None,
        }
        job = Job(
            model=options,
            vocab_size=int(config.get_text_config().vocab_size),
            strategy=None if layout is None else layout.options,
            ranks=1 if layout is None else layout.ranks,
            **{"steps": _STEPS, **changes},
        )
        try:
            return self._run(job)
        except ConfigError as error:
            raise SkippedError(f"refused: {error}") from error

    @cached_property
    def _alone(self) -> Curve:
        return self._train()

    def _fit(self, layout: NamedLayout) -> Finding:
        return _beside(self._train(layout), self._alone)

    def _resume(self) -> Finding:
        first, *others = self._layouts
        last = others[-1] if others else layout_of("one")
        half, path = _STEPS // 2, str(self._work / "half")
        before = self._train(first, steps=half, save_to=path)
        after = self._train(last, ckpt_path=path)
        whole = Curve(before.losses + after.losses, before.norms + after.norms)
        details = {f"step {half + 1} on": f"{last.name}, after {first.name}"}
        found = _beside(whole, self._alone)
        return replace(found, details={**details, **found.details})

    def _adapted(self, layout: NamedLayout | None) -> Curve:
        peft = {"r": 4, "lora_alpha": 8.0}
        path = None if layout is None else str(self._work / "adapters")
        return self._train(layout, peft=peft, save_to=path)

    def _lora(self) -> Finding:
        return _beside(self._adapted(self._layouts[0]), self._adapted(None))

    def _merge(self) -> Finding:
        if find_spec("peft") is None:
            raise SkippedError("peft is not installed")
        require("peft", "the item merge")
        from peft import PeftModel

        checkpoint, folder, merged = (self._work / n for n in ("adapters", "peft", "merged"))
        if not checkpoint.exists():
            self._adapted(self._layouts[0])
        base = str(self._trained.path)
        with (self._work / "log").open("w") as log, redirect_stdout(log):
            export(str(checkpoint), str(folder), overwrite=True)
            merge(str(checkpoint), str(merged), base=base, dtype="float32", overwrite=True)
        tokens = self._prompts()
        model: Any = self._trained.bridge().reference_model().eval()
        plain = _last_logits(model, tokens)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                adapted: Any = PeftModel.from_pretrained(model, str(folder)).eval()
            except ValueError as error:
                if "incompatible" not in str(error):
                    raise
                raise SkippedError(f"peft refuses the folder: {error}") from error
        missing = [str(one.message) for one in said if _MISSING in str(one.message)]
        if missing:
            raise SkippedError(f"peft leaves adapters of the folder out. {missing[0][:200]} …")
        expected = _last_logits(adapted, tokens)
        found = Subject("merged", merged, "", self._trained.trusts).bridge().reference_model()
        effect = relative(plain, expected)
        if effect <= 10 * TOLERANCE:
            raise CheckpointError(
                f"the adapters change logits by {effect:.1e} of the largest one, too little to see "
                "whether they were merged"
            )
        return Finding(
            "logits of peft on the base; largest difference, relative to the largest logit",
            relative(_last_logits(found.eval(), tokens), expected), TOLERANCE,
            "weights in fp32, rounded once when they were added", {"without adapters": effect},
        )  # fmt: skip

    # --------------------------------------------------------------------------------------- text

    def _prompts(self) -> Tensor:
        vocabulary = self._trained.bridge().config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, int(vocabulary), (2, _PROMPT), generator=generator)

    def _text(self) -> Finding:
        prompts = self._prompts()
        try:
            engine = load_engine(self._trained.path, dtype="float32", stops=())
            sampling = Sampling(max_new_tokens=_NEW, temperature=0.0)
            texts = engine.generate(prompts.tolist(), sampling)
        except ConfigError as error:
            raise SkippedError(f"refused: {error}") from error
        expected = prompts
        model: Any = self._trained.bridge().reference_model().eval()
        for _ in range(_NEW):
            best = _last_logits(model, expected).argmax(-1, keepdim=True)
            expected = torch.cat([expected, best], dim=1)
        ours = torch.tensor([one.tokens for [one] in texts])
        return Finding(
            "the most likely tokens of transformers, computed without a cache; tokens that differ",
            int((ours != expected[:, _PROMPT:]).sum()), 0,
            "two tokens are rarely as likely as each other to all digits of fp32",
            {"tokens": ours.numel(), "engine": type(engine).__name__},
        )  # fmt: skip


def _farthest(
    expected: str,
    differences: Mapping[str, float],
    tolerance: float,
    reason: str,
    details: Mapping[str, Any],
) -> Finding:
    """Return the finding of several models: NaN and the largest difference count."""
    values = torch.tensor(list(differences.values()), dtype=torch.float64)
    return Finding(expected, float(values.max()), tolerance, reason, {**differences, **details})


def _beside(curve: Curve, alone: Curve) -> Finding:
    """Compare losses and gradient norms with one process."""
    found, expected = (
        torch.tensor([one.losses, one.norms], dtype=torch.float64) for one in (curve, alone)
    )
    return Finding(
        f"losses and gradient norms of {expected.shape[1]} steps of plain Lightning in one "
        "process; largest relative difference",
        float(((found - expected).abs() / expected.abs()).max()), TOLERANCE, _SUMS,
        {"losses": curve.losses, "gradient norms": curve.norms},
    )  # fmt: skip


@torch.no_grad()
def _last_logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of each row's last token [b, v]."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits[:, -1].float()
