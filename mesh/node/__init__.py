"""A node, put together from all the other packages. Nothing imports this but the command line."""
