"""Benchmark programs; the newest pages of results, with machine, date and versions, are in
``results``.
"""
