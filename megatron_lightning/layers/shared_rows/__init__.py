"""Context parallelism of models without a plan: what mixes tokens is found and proven."""
