"""The forward pass behind one protocol: our own decoder, transformers' eager, compiled and as CUDA graphs."""
