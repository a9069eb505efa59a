"""An engine on a thread of its own, for asyncio and for servers: requests in, events out."""
