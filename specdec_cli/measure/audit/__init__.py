"""Tests of exactness: equality with plain decoding, explained divergences, samples against p."""
