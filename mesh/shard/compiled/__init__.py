"""A span as compiled graphs: one for each layer, in 8 or 4 bit, with no Python inside a layer."""
