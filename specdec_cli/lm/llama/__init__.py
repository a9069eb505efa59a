"""The decoder of our own for the Llama shape: its weights, its C++ step, and how that is compiled."""
