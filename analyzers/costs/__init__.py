"""How long does an op, a step and a collective take on a device, how much memory, and how sure is that?"""
