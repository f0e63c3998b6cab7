"""Progress of a run: bars, lines of text, and losses in them."""
