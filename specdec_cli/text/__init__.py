"""Text: tokenizers, chat templates, tokens to text as they stream, stop strings."""
