"""Token files, datasets, batches and tokenizers."""
