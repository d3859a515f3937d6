"""Where training steps come from: factories, transformers and timm models. Start at ``sources.resolve``."""
