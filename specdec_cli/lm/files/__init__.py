"""Checkpoint folders: what they contain, read before any weight is loaded."""
