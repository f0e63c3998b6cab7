"""Installed as megatron_lightning.strategies; always import it by that name."""

if __name__ != "megatron_lightning.strategies":  # a second copy of these classes would fail isinstance checks
    raise ImportError("import megatron_lightning.strategies, not strategies")
