"""The process a stranger's code runs in: warmed once, forked per job, walled in by the kernel.

`job` is the daemon's side, `zygote`, `child` and `lockdown` the other; `doctor` says how strong the
walls are on this machine; `policy` is the inner fence for keys that are not trusted.
"""
