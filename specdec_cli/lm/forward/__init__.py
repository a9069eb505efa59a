"""The forward pass behind one protocol: our own decoder, transformers' eager and as CUDA graphs."""
