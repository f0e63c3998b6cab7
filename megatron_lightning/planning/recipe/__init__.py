"""Configuration files as plain values, without their objects."""
