"""Workloads: data sets, row files, and the prompts and turns read from them."""
