"""Protocol of a step: participants, windows onto user code, and a run of the step."""
