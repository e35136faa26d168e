"""Environment, wiring and the training loop."""
