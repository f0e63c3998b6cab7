"""Layouts of a recipe that fit into a device, by modelled time."""
