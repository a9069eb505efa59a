"""Request bodies as engine requests: fields, prompts, conversations, limits."""
