"""How many samples each worker should process: predicted speeds, batch sizes, and what they come to (LB-BSP)."""
