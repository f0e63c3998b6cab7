"""How the ranks of a job are started, and what each does when it fails."""
