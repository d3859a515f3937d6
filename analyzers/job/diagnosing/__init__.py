"""Which rank is slow and why, and did the run go as the plan said?."""
