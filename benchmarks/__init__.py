"""What the guarantees cost, as ratios: `make bench`."""
