"""What a checkpoint folder holds and what it claims, read before any weight is loaded."""
