"""Starts of a run and stops on request: their records and their reasons."""
