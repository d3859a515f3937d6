"""A training script recorded as it runs, without a GPU and without memory for its weights. Start at :mod:`.script`."""
