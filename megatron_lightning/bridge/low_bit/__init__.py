"""Folders with weights in 8 and 4 bits, as servers load them."""
