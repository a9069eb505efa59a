"""transformers' forward pass over packed rows: its attention, eager, compiled and as CUDA graphs."""
