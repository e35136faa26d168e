"""Weight gradients apart from input gradients, and the signals that they are ready."""
