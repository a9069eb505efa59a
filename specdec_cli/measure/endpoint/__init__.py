"""A server measured over HTTP: requests, arrivals, answers and counters."""
