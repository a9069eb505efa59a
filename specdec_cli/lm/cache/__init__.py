"""The KV cache: blocks, contexts, memory limits and reads."""
