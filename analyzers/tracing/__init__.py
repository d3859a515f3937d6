"""What one training step does: torch modules and ONNX files become a Graph."""
