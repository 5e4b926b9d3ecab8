"""What watches the hops of an asker while it generates: pace, sanity, honesty, reputation.

It observes: hops tell `oversight.Oversight` what they do, and nothing here feeds, samples
or repairs. What follows from a verdict happens elsewhere: a hop is failed, a shard is left out.
"""
