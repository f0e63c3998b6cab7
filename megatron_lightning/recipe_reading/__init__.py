"""Configuration files of ``fit``, read without making their objects, and commands for them."""
