"""Which job gets which GPUs: measured jobs, policies, a replay simulator and its metrics."""
