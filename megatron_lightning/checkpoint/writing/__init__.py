"""Write checkpoints: at once or in the background, and made real by a rename."""
