"""Another engine's server behind ours: its answers, our page, keys and limits."""
