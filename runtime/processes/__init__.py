"""The processes of a job: who is there, what they agree on and note, how they end. Start at :class:`.job.DistributedJob`."""
