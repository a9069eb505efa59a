"""The JSON documents of the commands: one pydantic model each, made from what was measured."""
