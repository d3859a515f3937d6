"""How long each op takes on a device and a network."""
