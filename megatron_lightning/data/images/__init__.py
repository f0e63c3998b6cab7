"""Images in conversations: sources, growth of placeholders, entries for models."""
