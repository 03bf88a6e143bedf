"""Tensors to blocks: recipes, kernels, and what is measured on the result."""
