"""Results and verdicts of bench, sweep-k and compare-drafts, and the journal of a run."""
