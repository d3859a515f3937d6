"""Which rank is slow, and why."""
