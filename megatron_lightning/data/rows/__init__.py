"""Rows of fine-tuning: documents of files and of the Hub, encoded, packed, paired and shown."""
