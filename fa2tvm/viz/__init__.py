"""What people look at: the block-by-block player, and reports of tuning and of benchmarks."""
