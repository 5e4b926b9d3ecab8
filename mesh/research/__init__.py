"""Research beside traces: steering of generations, harvests of activations."""
