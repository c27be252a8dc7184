"""Compare with other attention kernels: peers, checks, timing, rows, tables and plots."""
