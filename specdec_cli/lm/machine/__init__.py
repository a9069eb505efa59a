"""The share of the machine that this process may use: memory, cores and threads."""
