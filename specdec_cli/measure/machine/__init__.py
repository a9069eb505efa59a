"""The machine that measures: its load and limits, and what doctor finds before a run."""
