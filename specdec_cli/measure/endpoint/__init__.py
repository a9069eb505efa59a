"""A server measured over HTTP: its requests, arrivals, answers and counters."""
