"""Our own decoder for the Llama architecture: weights, the C++ step and its compilation."""
