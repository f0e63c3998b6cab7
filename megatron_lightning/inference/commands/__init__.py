"""The commands ``generate``, ``evaluate`` and ``serve``, and what they load."""
