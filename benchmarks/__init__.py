"""What msgbus costs, as ratios to the plainest code that does the same: `python -m benchmarks`."""
