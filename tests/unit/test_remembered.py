"""What a ModelCheckpoint calls best and last after saves that failed, for more than one kept checkpoint."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from torch import tensor

from megatron_lightning.strategies.remembered import RememberedCheckpoints


def _keep(scores: dict[str, float], **options: Any) -> tuple[ModelCheckpoint, RememberedCheckpoints]:
    keep = ModelCheckpoint(monitor="score", mode="max", **options)
    remembered = RememberedCheckpoints(lambda: [keep])
    _name(keep, scores)
    remembered.start()
    return keep, remembered


def _name(keep: ModelCheckpoint, scores: dict[str, float]) -> None:
    """Do what the callback does before it saves."""
    keep.best_k_models = {path: tensor(score) for path, score in scores.items()}
    keep.best_model_path, keep.kth_best_model_path = max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)
    keep.best_model_score, keep.kth_value = tensor(max(scores.values())), tensor(min(scores.values()))


def test_a_failed_save_gives_its_place_back() -> None:
    keep, remembered = _keep({"a": 1, "b": 2}, save_top_k=2)
    _name(keep, {"b": 2, "c": 3})
    remembered.begin({})
    remembered.settle("c", committed=False)
    assert set(keep.best_k_models) == {"a", "b"} and keep.best_model_path == "b" and keep.kth_best_model_path == "a"
    assert (keep.best_model_score, keep.kth_value) == (2, 1)
    assert remembered.keeps("a") and remembered.keeps("b") and not remembered.keeps("c")
    _name(keep, {"b": 2, "d": 4})
    remembered.begin({})
    remembered.settle("d", committed=True)
    assert not remembered.keeps("a") and keep.best_model_path == "d"


def test_a_failure_that_is_known_when_the_next_save_begins() -> None:
    keep, remembered = _keep({"a": 1, "b": 2}, save_top_k=2)
    _name(keep, {"b": 2, "c": 3})
    remembered.begin({})
    _name(keep, {"c": 3, "d": 4})  # b was pushed out too
    states = {keep.state_key: keep.state_dict(), "other": {}}
    remembered.settle("c", committed=False)
    remembered.begin(states)
    assert set(keep.best_k_models) == {"b", "d"} and keep.best_model_path == "d" and keep.kth_best_model_path == "b"
    assert set(states[keep.state_key]["best_k_models"]) == {"b", "d"} and states["other"] == {}


def test_the_first_save_fails() -> None:
    keep = ModelCheckpoint(monitor="score", mode="min", save_last=True)
    remembered = RememberedCheckpoints(lambda: [keep])
    remembered.start()
    _name(keep, {"a": 1})
    keep.last_model_path = "a"
    remembered.begin({})
    remembered.settle("a", committed=False)
    assert (keep.best_k_models, keep.best_model_path, keep.last_model_path, keep.kth_value) == ({}, "", "", float("inf"))


def test_a_failed_save_over_a_committed_one() -> None:
    keep, remembered = _keep({"a": 1}, save_top_k=1)
    _name(keep, {"a": 5})
    remembered.begin({})
    remembered.settle("a", committed=False)
    assert keep.best_model_path == "a" and keep.best_model_score == 1
