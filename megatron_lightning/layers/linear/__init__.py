"""Linear layers and embeddings over tensor-parallel ranks, and their GEMMs."""
