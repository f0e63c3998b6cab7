"""Guards of what hooks and callbacks do to weights, random states and options."""
