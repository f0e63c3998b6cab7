"""Guards: what looks for mistakes of the user's code that training would not show."""
