"""The engine: the step, sequences, the scheduler, verification."""
