"""Our own decoder for Llama and related families: weights, the C++ step and its compilation."""
