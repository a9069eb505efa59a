"""Language models behind one door: loading, block cache, attention. The only room that knows transformers' models."""
