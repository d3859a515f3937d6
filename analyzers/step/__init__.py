"""One training step on one device and network."""
