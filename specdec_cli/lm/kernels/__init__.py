"""Packed and quantized linear layers, and attention kernels for GPUs."""
