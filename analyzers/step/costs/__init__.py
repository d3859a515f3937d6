"""How long do an op and a step take on a device, how much memory, and how sure is that? The cost model."""
