"""The hook inside a training process: thin and safe."""
