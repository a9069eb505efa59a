"""A conversation measured turn by turn, on an engine or an endpoint."""
