"""How a batch is run."""
