"""Many jobs on one cluster: measured jobs, policies, a replay simulator and its metrics."""
