"""The command line: one file per verb, all of them clients of the local daemon except `up`."""
