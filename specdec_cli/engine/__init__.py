"""The engine: the step, sequences, the scheduler, verification; requests, arms and the driver that decodes them."""
