"""Text as token files: documents read, divided into pieces, tokenized and written."""
