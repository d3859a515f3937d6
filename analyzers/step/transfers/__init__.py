"""In which order parameters should travel, and how good that order is (TicTac)."""
