"""The HTTP server: OpenAI's routes, metrics and the page."""
