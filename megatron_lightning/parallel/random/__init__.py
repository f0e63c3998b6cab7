"""Random streams of layers and replicas."""
