"""Starting the ranks of a job, and their end after a failure."""
