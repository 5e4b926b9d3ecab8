"""The jobs a node has accepted: kept on disk, taken in turn, told of, ended on time.

`service` is the queue; `line` decides who is next; `records` is what the table holds, `spool` the
files beside it; `feed` is what a waiting client hears. Knows nothing of HTTP or of what a job does.
"""
