"""Statistics of layers over the tokens of an evaluation."""
