"""Families of transformers whose modules are patched: one file each, and the recurrences that they share."""
