"""Recurrent and convolutional state: where it is kept, and the scans that carry it from token to token."""
