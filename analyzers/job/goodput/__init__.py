"""How fast a job runs, and how much of that is progress (Pollux)."""
