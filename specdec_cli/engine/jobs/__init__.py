"""An engine in a thread of its own: requests in, events out, for asyncio and for servers."""
