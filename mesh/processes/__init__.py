"""The processes of a node: how one is started, what they say to each other, who watches them."""
