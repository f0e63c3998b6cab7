"""Indexed files, ``PREFIX.bin`` and ``PREFIX.idx``: read, checked, merged, and read at a URL."""
