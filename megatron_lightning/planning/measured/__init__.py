"""Plans of modules that are measured instead of declared."""
