"""One job on many devices."""
