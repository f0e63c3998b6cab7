"""A GPU for a quarter of an hour: tests and cases in the order of their worth, within a budget."""
