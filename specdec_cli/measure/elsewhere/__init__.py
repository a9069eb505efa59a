"""Another engine on this machine: its server started as a subprocess, asked over HTTP and ended."""
