"""`hearthnet top`: a dashboard in the terminal. Sees the daemon's HTTP API and nothing else."""
