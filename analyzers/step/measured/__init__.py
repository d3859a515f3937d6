"""What clocks said of steps: profiler traces, worker tables, telemetry, this machine."""
