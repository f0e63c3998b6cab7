"""Commands on checkpoints, with a progress bar."""
