"""Request bodies turned into engine requests: fields, prompts, conversations, limits."""
