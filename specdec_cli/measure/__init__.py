"""Measurement: meters, audits, statistics."""
