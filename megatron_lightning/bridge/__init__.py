"""From Hugging Face folders and back: their tensors as sources of parameters, read box by box."""
