"""What the data pipeline costs: `make bench-spark`."""
