"""``python -m megatron_lightning`` is the command line."""

from megatron_lightning.cli import main

if __name__ == "__main__":
    main()
