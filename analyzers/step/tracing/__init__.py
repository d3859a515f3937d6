"""What one training step does: torch modules and ONNX files become a Graph. Start at ``sources.load_graph``."""
