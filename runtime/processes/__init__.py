"""The processes of a job: how they find, agree with and check each other, and end. Start at :class:`.job.DistributedJob`."""
