"""Guards of gradients, from backward to the optimizer step."""
