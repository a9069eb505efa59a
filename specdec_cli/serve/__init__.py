"""The HTTP server: OpenAI's routes, the bridge between asyncio and the engine's thread, metrics and the page."""
