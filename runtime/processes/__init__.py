"""The processes of a job: who is there, what they agree on, how they end. Start at :class:`.job.DistributedJob`."""
