"""Packed and quantised linear layers, and the attention kernels of the GPU."""
