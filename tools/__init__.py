"""What makes things that hearthnet ships, and is not shipped itself."""
