"""Training by comparison, with rewards, and on texts of the model's own."""
