"""Sampling: parameters, the processor chain from logits to p and q, keyed noise."""
