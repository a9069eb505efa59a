"""Tests of exactness: equality with plain decoding, divergences explained, draws against p."""
