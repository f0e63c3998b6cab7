"""Programs that measure; their results, with machine, date and versions, are kept in ``results``."""
