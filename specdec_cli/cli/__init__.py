"""The command line: one file per command; parse, load the recipe, call, report."""
