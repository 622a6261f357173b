"""What the bus tells about itself: counters, metrics, logs, traces."""
