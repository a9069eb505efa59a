"""The machine during a measurement: its load and limits, and doctor's checks before a run."""
