"""What Prometheus scrapes: the counters, the histograms and their text form."""
