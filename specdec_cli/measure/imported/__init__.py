"""Runs made elsewhere: logs, metrics and reports of other tools read into counts of speculation."""
