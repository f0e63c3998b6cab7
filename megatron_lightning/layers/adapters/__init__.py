"""Low-rank adapters of layers, and layers that compute otherwise for a time."""
