"""How many samples each worker should process: predicted speeds and batch sizes (LB-BSP)."""
