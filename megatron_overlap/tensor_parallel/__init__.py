"""Linear layers, embedding and cross entropy cut over the tensor-parallel group."""
