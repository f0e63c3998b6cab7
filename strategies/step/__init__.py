"""Running a batch."""
