"""Language models behind one door: load, block cache, attention. The only room that knows transformers' models."""
