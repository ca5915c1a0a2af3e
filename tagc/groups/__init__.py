"""Process groups that compress a mesh's dimensions: activations of tensor, sequence, context,
pipeline and expert parallelism."""
