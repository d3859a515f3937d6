"""Processes that are started to be measured: steps, networks, overhead, machines. Start at :mod:`.campaign`."""
