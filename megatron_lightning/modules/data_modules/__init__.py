"""Bases of the data modules, checks of their data, and data of a configuration file."""
