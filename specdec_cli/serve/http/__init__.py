"""The application: routes, guards, the server and its connections."""
