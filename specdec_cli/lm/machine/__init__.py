"""What this process may use of the machine: memory, cores and threads."""
