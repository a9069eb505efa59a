"""Prometheus metrics: counters, histograms and their text format."""
