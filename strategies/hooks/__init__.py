"""Lightning's hooks of the strategy, by subject."""
