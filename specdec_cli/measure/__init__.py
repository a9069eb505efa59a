"""Measurement: workloads, traces, benchmarks, audits, statistics."""
