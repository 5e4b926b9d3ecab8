"""One widget a file: each draws from a picture and does nothing else."""
