"""Steps that run again: for a verdict on a step, or for the collectives of other ranks alone."""
