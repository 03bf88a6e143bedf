"""a3b: mixture-of-experts models with about 3 billion active parameters, from safetensors to a served endpoint."""

__version__ = "0.5.0"
__all__ = ["__version__"]
