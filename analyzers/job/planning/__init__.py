"""From a job to its plan: layouts, strategies, the decision."""
