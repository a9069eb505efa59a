"""The application: routes, guards, and the server."""
