"""Text and scores by the parts of a model: keys, requests, steps and token choice."""
