"""A conversation measured turn by turn, with an engine or with an endpoint."""
