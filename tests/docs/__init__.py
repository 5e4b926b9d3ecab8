"""What the pages say is true: read with the code that they are about."""
